"""`skerry plan`: the arithmetic against numbers worked out by hand, and what must hold whatever is asked. `skerry doctor`: a
link of known width and length, and what it says where something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from islands import small_model

import skerry
from skerry.chaos.proxy import Condition, LinkProxy, LinkState
from skerry.cli import main
from skerry.config import SyncConfig
from skerry.errors import ConfigError
from skerry.plan.devices import DENSE_TFLOPS, step_time_s
from skerry.plan.planning import (
    FULL,
    LONGEST,
    Island,
    bits,
    choices,
    data_parallel_utilisation,
    host_bytes,
    join_s,
    syncer_bytes,
    weigh,
)
from skerry.plan.text import island_of, link_of, number_of, plan_lines
from skerry.wire import calls

SITE = Island("site", 1.0, 1000.0, 1000.0, 0.04)


def test_bits_are_those_of_the_codecs() -> None:
    assert [bits(name) for name in ("bf16", "int8", "int4", "topk3", "topk1")] == pytest.approx(
        [16, 8.125, 4.125, 8 * 214 / 4096, 8 * 74 / 4096]
    )


def test_a_choice_comes_to_what_can_be_worked_out_by_hand() -> None:
    """A billion parameters, a second a step, bf16, H = 24: 16e9 / 24 bits a second each way."""
    found = weigh(1e9, [SITE, SITE], 24, "bf16", "bf16")
    assert found.mbit == pytest.approx(666.7, rel=1e-3) and found.load == pytest.approx(0.6667, rel=1e-3)
    assert found.gbit == pytest.approx(1.333, rel=1e-3) and found.fragments == 24
    # 41.7M elements: 0.667 s each way alone, three times that in a link two thirds full; a third of a second to merge two, half
    # a second to store them; 0.12 s of trips.
    assert found.exchange_steps == pytest.approx(3 * (0.6667 + 0.6667) + 0.3333 + 0.5208 + 0.02 + 0.12, rel=1e-3)
    assert found.kept == pytest.approx(1 - found.exchange_steps / 24)
    assert host_bytes(1e9, found) == pytest.approx(4e9 + 6 / 24 * 1e9 * 8)
    assert syncer_bytes(1e9, found, 2) == pytest.approx(14.25e9 + 2 * 2 / 24 * 1e9 * 6)
    assert join_s(1e9, [SITE, SITE]) == pytest.approx(32.0)


def test_rounds_follow_the_fastest_island_and_the_thinnest_link_is_told() -> None:
    quick, thin = Island("quick", 0.2, 10_000, 10_000, 0.01), Island("thin", 2.0, 500, 500, 0.01)
    found = weigh(1e9, [quick, thin], 24, "int8", "int8")
    # Asked for the whole model every 24 × 0.2 s: 8.125e9 bits in 4.8 s, whoever it is.
    assert (
        found.worst == "thin" and found.mbit == pytest.approx(1692.7, rel=1e-3) and found.load == pytest.approx(3.385, rel=1e-3)
    )
    assert not found.fits and found.why_not == "needs 1,693 Mbit/s, 3.4 times the link of thin"


def test_data_parallel_training_waits_for_every_gradient() -> None:
    # Two islands send and receive each gradient once: 16e9 bits over 1000 Mbit/s, and one round trip.
    assert data_parallel_utilisation(1e9, [SITE, SITE]) == pytest.approx(1 / (1 + 16 + 0.04))
    assert data_parallel_utilisation(1e9, [SITE]) == 1.0


def test_devices_are_as_fast_as_their_peak_allows() -> None:
    assert step_time_s("h100", 8, 1e9, 1e6) == pytest.approx(6e15 / (8 * 989e12 * 0.4))
    assert all(value > 0 for value in DENSE_TFLOPS.values())


amounts = st.floats(1e6, 1e11)
sites = st.builds(Island, st.just("site"), st.floats(0.01, 30), st.floats(1, 1e5), st.floats(1, 1e5), st.floats(0, 0.3))


@given(amounts, st.lists(sites, min_size=1, max_size=4))
def test_what_is_recommended_fits_and_costs_least_of_what_fits(parameters: float, islands: list[Island]) -> None:
    found = choices(parameters, islands)
    best = found[0]
    fitting = [choice for choice in found if choice.fits]
    assert [choice.fits for choice in found] == [True] * len(fitting) + [False] * (len(found) - len(fitting))
    for choice in fitting:
        assert choice.load <= FULL and choice.exchange_steps <= LONGEST * choice.every and choice.cost >= best.cost
    for choice in found:
        assert 0 <= choice.kept <= 1 and 1 <= choice.fragments <= choice.every and 1 <= choice.overlap < choice.every
    text = plan_lines(parameters, islands)
    assert ("nothing fits" in text) == (not fitting)
    if fitting:  # the settings it prints are settings
        words = next(line for line in text.splitlines() if "--sync.every" in line).split()
        values = dict(zip(words[::2], words[1::2], strict=True))
        SyncConfig(
            every=int(values["--sync.every"]), fragments=int(values["--sync.fragments"]), send=values["--sync.send"],
            overlap=int(values["--sync.overlap"]), quorum=int(values["--sync.quorum"]), publish=values["--sync.publish"],
        )  # fmt: skip


@given(amounts, sites, st.floats(1.0, 100.0))
def test_a_wider_link_is_never_worse(parameters: float, site: Island, times: float) -> None:
    wider = Island("site", site.step_s, site.up_mbit * times, site.down_mbit * times, site.round_trip_s)
    before, after = choices(parameters, [site])[0], choices(parameters, [wider])[0]
    assert after.fits >= before.fits
    if before.fits:
        assert after.cost <= before.cost + 1e-9


def test_amounts_links_and_islands_are_read() -> None:
    assert [number_of(text, "x") for text in ("1.2b", "350M", "524288", "1_000k")] == [1.2e9, 3.5e8, 524288, 1e6]
    assert link_of("500") == (500, 500, 0) and link_of("500/100:40") == (100, 500, 0.04)
    assert island_of("0.8s@20:80", 3, 1e9, 1e6, None) == Island("island 3 (0.8s@20:80)", 0.8, 20, 20, 0.08)
    assert island_of("8xH100", 0, 1e9, 1e6, (10, 20, 0.03)).step_s == pytest.approx(step_time_s("h100", 8, 1e9, 1e6))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--params", "many", "--island", "h100", "--link", "10"],
            "--params must be a number such as 350m or 1.2b, got 'many'",
        ),
        (["--params", "1b", "--island", "abacus", "--link", "10"], "device must be one of b200, h200"),
        (["--params", "1b", "--island", "0s", "--link", "10"], "a step time must be > 0"),
        (["--params", "1b", "--island", "h100"], "h100 has no link"),
        (["--params", "1b", "--island", "h100", "--link", "fast"], "a link must be Mbit/s"),
        (["--params", "1b", "--island", "h100", "--measured", "/nowhere"], "/nowhere is not output of skerry doctor --json"),
        (["--params", "1b", "--island", "8 h100", "--link", "10"], "an island must be devices such as 8xh100"),
    ],
)
def test_what_cannot_be_planned_gets_one_clear_line(capsys, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and said.count("\n") == 1


# ---------------------------------------------------------------- doctor


@pytest.fixture
def address(tmp_path: Path, start_syncer) -> str:
    return start_syncer(skerry.create(tmp_path / "run", small_model(), SyncConfig(fragments=2, send="int4"))).address


def test_the_doctor_finds_out_how_wide_and_long_a_link_is(address: str, tmp_path: Path, capsys) -> None:
    host, port = address.split(":")
    proxy = LinkProxy(["here"], (host, int(port)))
    try:
        proxy.set("here", LinkState(up=Condition(8e6, 0.02), down=Condition(16e6, 0.03)))
        written = tmp_path / "link.json"
        main(["doctor", proxy.address("here"), "--seconds", "0.6", "--connections", "2", "--json", str(written)])
    finally:
        proxy.close()
    found = json.loads(written.read_text())
    assert found["well"] and 0.05 <= found["round_trip_s"] < 0.5 and abs(found["clock_offset_s"]) < 1.0
    # 64 and 128 Mbit/s; a busy machine may see less, and buffers on the way a little more.
    assert 24 < found["up_mbit"] < 90 and 48 < found["down_mbit"] < 180
    said = capsys.readouterr().out
    assert "H = 24, P = 2, int4 up, fp32 down" in said and "PROBLEM" not in said
    main(["plan", "--params", "10m", "--island", "1s", "--measured", str(written)])
    assert "use              H = 24" in capsys.readouterr().out


def test_the_doctor_says_what_is_wrong_and_stops(address: str, free_port: int, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", f"127.0.0.1:{free_port}"])
    assert ended.value.code == 1 and "PROBLEM: no answer at 127.0.0.1" in capsys.readouterr().out
    monkeypatch.setattr(calls, "PROTOCOL", 99)
    with pytest.raises(SystemExit):
        main(["doctor", address])
    assert "PROBLEM: protocol mismatch: the syncer speaks version" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", address, "--ca", "/nowhere.pem"])
    assert "PROBLEM" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "10.0.0.1:7070"])
    assert "not this machine" in capsys.readouterr().out and ended.value.code == 1


def test_the_doctor_takes_a_run_folder_for_its_address(tmp_path: Path) -> None:
    with pytest.raises((SystemExit, ConfigError)):
        main(["doctor", str(tmp_path)])
