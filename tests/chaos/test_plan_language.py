"""The language of chaos plans: what is read, what is refused, and that the same plan gives the same faults."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.chaos.kinds import FAULTS
from skerry.chaos.parse import load_plan, parse_faults, plan_from, read_plan
from skerry.chaos.plan import Fault, Plan, RandomFaults
from skerry.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
POSITIVE = st.floats(0.001, 1e6).map(lambda value: round(value, 3))


@st.composite
def any_fault(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from([FAULTS.get(name) for name in sorted(FAULTS.names())]))
    parts = (["island-0", "island-12"] if kind.of_islands else []) + (["syncer"] if kind.of_syncer else [])
    when = draw(st.sampled_from(["at once", "at_s", "at_step"]))
    return Fault(
        kind.name,
        draw(st.sampled_from(parts)),
        draw(POSITIVE) if when == "at_s" else None,
        draw(st.integers(0, 10**6)) if when == "at_step" else None,
        draw(POSITIVE),
        0.0 if kind.amount is None else (kind.above or 0.0) + draw(POSITIVE),
        draw(st.sampled_from(["both", "up", "down"])) if kind.link else "both",
    )


@given(any_fault())
def test_short_form_of_a_fault_reads_back_as_the_same_fault(fault: Fault) -> None:
    assert parse_faults(fault.words) == [fault]


@given(st.lists(any_fault(), min_size=1, max_size=4))
def test_several_faults_are_separated_by_commas(faults: list[Fault]) -> None:
    assert parse_faults(", ".join(fault.words for fault in faults)) == faults


@pytest.mark.parametrize(
    "words, fault",
    [
        ("kill island-2 @ step 120", Fault("kill", "island-2", at_step=120)),
        ("kill syncer for 5s", Fault("kill_syncer", "syncer", for_s=5)),
        ("kill_syncer @ 3 s", Fault("kill_syncer", "syncer", at_s=3)),
        ("slow island-0 2.5x", Fault("slow", "island-0", amount=2.5)),
        ("slow island-0", Fault("slow", "island-0", amount=4)),
        ("throttle island-1 2 Mbps up @ 1s for 9s", Fault("throttle", "island-1", 1, for_s=9, amount=2, direction="up")),
        ("clock syncer -30s", Fault("clock", "syncer", amount=-30)),
        ("fill_disk for 4s", Fault("fill_disk", "syncer", for_s=4)),
    ],
)
def test_short_form_is_read_as_it_is_meant(words: str, fault: Fault) -> None:
    assert parse_faults(words) == [fault]


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "no fault in ''"),
        ("explode", "names no island"),
        ("tickle island-1", "kind must be one of kill, freeze"),
        ("kill island-1 @ noon", "is not a fault; write it like"),
        ("kill island-1 3x", "kill takes no number, got 3"),
        ("slow island-1 3ms", "factor must be in x, got ms"),
        ("slow island-1 0.5x", "slow island-1: factor must be > 1, got 0.5"),
        ("delay island-1 0", "ms must be other than 0"),
        ("cut syncer", "cut applies to an island, got 'syncer'"),
        ("fill_disk island-1 for 1s", "fill_disk applies to the syncer, got 'island-1'"),
        ("freeze syncer", "for_s must be > 0, or the run would never end"),
        ("kill island-1 up", "direction must be left out"),
        ("nowhere.toml", "no chaos plan at nowhere.toml"),
    ],
)
def test_a_mistake_in_words_gets_one_clear_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_plan(words)
    assert message in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"faults": []}, "faults is not a setting; known here: fault, random"),
        ({"fault": 3}, "fault must be a list of tables"),
        ({"fault": [{"kind": "kil", "island": 0}]}, "kind must be one of"),
        ({"fault": [{"kind": "kill", "island": 0}]}, "fault[0].at_s or fault[0].at_step must be given"),
        ({"fault": [{"kind": "kill", "at_s": 1}]}, "fault[0].island must be given for kill"),
        ({"fault": [{"kind": "kill", "island": 0, "at_s": 1, "at_step": 2}]}, "give at_s or at_step, not both"),
        ({"fault": [{"kind": "kill", "island": "two", "at_s": 1}]}, "fault[0].island must be int, got 'two'"),
        ({"fault": [{"kind": "kill", "island": 0, "part": "syncer", "at_s": 1}]}, "must not be given together"),
        ({"fault": [{"kind": "kill", "island": 0, "at_s": -1}]}, "kill island-0: at_s must be >= 0, got -1.0"),
        ({"fault": [{"kind": "kill", "island": 0, "at_s": 1, "for_s": math.nan}]}, "for_s must be >= 0, got nan"),
        ({"fault": [{"kind": "delay", "island": 0, "at_s": 1, "mbps": 2}]}, "fault[0].mbps is not a setting"),
        ({"fault": [{"kind": "clock", "island": 0, "at_s": 1, "offset_s": math.inf}]}, "offset_s must be finite, got inf"),
        ({"fault": [{"kind": "delay", "island": 0, "at_s": 1, "direction": "in"}]}, "direction must be one of both, up, down"),
        ({"random": {}}, "random.mtbf_s must be given"),
        ({"random": {"mtbf_s": 0}}, "random.mtbf_s must be > 0, got 0.0"),
        ({"random": {"mtbf_s": 9, "kinds": ["fill_disk"]}}, "random.kinds must be kinds that apply to islands"),
        ({"random": {"mtbf_s": 9, "distribution": "normal"}}, "random.distribution must be one of exponential, fixed"),
        ({"random": {"mtbf_s": 9, "sead": 1}}, "random.sead is not a setting"),
        ({"random": {"mtbf_s": 0.001}}, "random.until_s must be at most 100 with this mtbf_s"),
    ],
)
def test_a_mistake_in_a_plan_file_gets_one_clear_line(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        plan_from(values)
    assert message in str(found.value) and "\n" not in str(found.value)


def test_file_and_words_give_the_same_faults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        '[[fault]]\nkind = "kill"\nisland = 2\nat_step = 120\nfor_s = 5\n'
        '[[fault]]\nkind = "throttle"\nisland = 1\nat_s = 3\nmbps = 2\ndirection = "down"\n'
    )
    assert read_plan(str(path)) == read_plan("kill island-2 @ step 120 for 5s, throttle island-1 2mbps down @ 3s")


def test_an_island_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="kill island-4 @ 1s: there are 4 islands, island-0 to island-3"):
        read_plan("kill island-4 @ 1s").timed(4)


@given(st.integers(0, 1000), st.integers(1, 5), st.floats(5, 50))
def test_same_plan_gives_the_same_faults_and_another_island_changes_no_other(seed: int, islands: int, mtbf_s: float) -> None:
    plan = Plan(random=RandomFaults(mtbf_s, seed, kinds=("kill", "freeze", "cut"), until_s=300, until_step=9))
    faults = plan.timed(islands)
    assert faults == plan.timed(islands)
    assert [fault for fault in plan.timed(islands + 1) if fault.part != f"island-{islands}"] == faults
    assert all(fault.before_step == 9 and fault.at_s < 300 and fault.for_s > 0 for fault in faults)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


def test_random_faults_come_as_often_and_last_as_long_as_said_and_never_overlap() -> None:
    faults = RandomFaults(100.0, seed=3, return_s=20.0, until_s=1e6).drawn(0)
    starts = [fault.at_s for fault in faults]
    ends = [fault.at_s + fault.for_s for fault in faults]
    gaps = [start - end for end, start in zip(ends, starts[1:], strict=False)]
    assert min(gaps) > -0.002
    assert sum(gaps) / len(gaps) == pytest.approx(100, rel=0.05)
    assert sum(fault.for_s for fault in faults) / len(faults) == pytest.approx(20, rel=0.05)
    fixed = RandomFaults(100.0, seed=3, return_s=20.0, distribution="fixed", until_s=1e4).drawn(0)
    assert {fault.for_s for fault in fixed} == {20.0}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "chaos").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_plans_are_valid_for_four_islands(path: Path) -> None:
    assert load_plan(path).timed(4)
