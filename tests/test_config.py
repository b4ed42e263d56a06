"""Settings: what is refused, with which words, and what comes back unchanged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.config import BeginConfig, Config, DataConfig, SyncConfig, TrainConfig, from_json, from_mapping, load, to_json
from skerry.errors import ConfigError, SkerryError


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        from_mapping(Config, values)
    text = str(refused.value)
    assert "\n" not in text
    return text


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def test_without_any_values_the_defaults_hold() -> None:
    assert from_mapping(Config, {}) == Config()


@pytest.mark.parametrize("path", ["spped", "sync.fragmetns", "sync.begin.step", "train.sync", "islands.name"])
def test_an_unknown_key_is_named_with_its_place(path: str) -> None:
    text = refusal(nested(path, 1))
    assert text.startswith(f"{path} is not a setting; known here: ")


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    assert refusal({"islands": {"cout": 3}}).endswith(
        "known here: cap_mbit, connections, count, device, regions, restarts, shards, threads"
    )


@pytest.mark.parametrize(
    "path, value, wanted",
    [
        ("sync.fragments", 2.0, "int"),
        ("sync.fragments", "8", "int"),
        ("sync.fragments", True, "int"),
        ("sync.every", [24], "int"),
        ("sync.wait", 1, "bool"),
        ("sync.wait", "true", "bool"),
        ("sync.outer_lr", "0.7", "float"),
        ("sync.outer_lr", False, "float"),
        ("train.compile", 0, "bool"),
        ("run", 7, "str"),
        ("sync", 3, "a table"),
        ("sync.begin", "fast", "a table"),
        ("data.suffixes", ".txt", "a list of strings"),
        ("data.suffixes", [".txt", 3], "a list of strings"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(path: str, value: object, wanted: str) -> None:
    assert refusal(nested(path, value)) == f"{path} must be {wanted}, got {value!r}"


@pytest.mark.parametrize("path", ["sync.outer_lr", "sync.silence_s", "train.lr", "train.clip", "sync.begin.outer_lr"])
def test_a_whole_number_will_do_for_a_fraction(path: str) -> None:
    config = from_mapping(Config, nested(path, 1))
    for key in path.split("."):
        config = getattr(config, key)
    assert config == 1.0 and type(config) is float


@pytest.mark.parametrize(
    "path, value, choices",
    [
        ("algorithm", "async", "decoupled, streaming, diloco, dp"),
        ("sync.adopt", "", "overwrite, blend, carry"),
        ("data.token_bytes", 3, "2, 4"),
        ("data.token_bytes", 2.0, "2, 4"),
        ("train.precision", ["fp32"], "fp32, bf16"),
    ],
)
def test_a_choice_outside_the_list_is_refused_with_the_list(path: str, value: object, choices: str) -> None:
    assert refusal(nested(path, value)) == f"{path} must be one of {choices}, got {value!r}"


@pytest.mark.parametrize(
    "path, value, requirement",
    [
        ("sync.fragments", 0, ">= 1"),
        ("sync.every", 0, ">= 1"),
        ("sync.overlap", -1, ">= 0"),
        ("sync.quorum", -1, ">= 0"),
        ("sync.grace", 1.0, "in [0, 1)"),
        ("sync.grace", -0.1, "in [0, 1)"),
        ("sync.outer_lr", 0.0, "> 0"),
        ("sync.outer_lr", float("nan"), "> 0"),
        ("sync.outer_momentum", 1.0, "in [0, 1)"),
        ("sync.staleness", -1, ">= 0"),
        ("sync.blend", 0.0, "in (0, 1]"),
        ("sync.blend", 1.1, "in (0, 1]"),
        ("sync.start_with", 0, ">= 1"),
        ("sync.budget_tokens", -1, ">= 0"),
        ("sync.silence_s", 0.0, "> 0"),
        ("sync.begin.steps", -1, ">= 0"),
        ("sync.begin.every", 0, ">= 1"),
        ("sync.begin.outer_lr", -1.0, "> 0"),
        ("sync.begin.outer_momentum", 1.0, "in [0, 1)"),
        ("sync.begin.islands", -2, ">= 0"),
        ("model.layers", -1, ">= 0 (0 takes the preset's)"),
        ("model.context", 1, ">= 2"),
        ("model.experts", 1, "0 (dense) or >= 2"),
        ("model.experts", -4, "0 (dense) or >= 2"),
        ("model.active", 0, ">= 1"),
        ("data.held_out", 0.0, "in (0, 0.5)"),
        ("data.held_out", 0.5, "in (0, 0.5)"),
        ("train.tokens", 0, ">= 1"),
        ("train.batch", 0, ">= 1"),
        ("train.accumulate", 0, ">= 1"),
        ("train.accumulate", 3, "a divisor of 8"),
        ("train.lr", -1.0, "> 0"),
        ("train.warmup", 1.0, "in [0, 1)"),
        ("train.weight_decay", -0.1, ">= 0"),
        ("train.beta2", 1.0, "in [0, 1)"),
        ("train.beta2", -0.5, "in [0, 1)"),
        ("train.final_lr", 1.5, "in [0, 1]"),
        ("train.clip", -0.5, ">= 0"),
        ("islands.count", 0, ">= 1"),
        ("islands.threads", -1, ">= 0"),
        ("islands.restarts", -1, ">= 0"),
        ("eval.every_tokens", 0, ">= 1"),
        ("eval.tokens", 0, ">= 1"),
        ("eval.final_tokens", 0, ">= 1"),
        ("eval.sample_tokens", -1, ">= 0"),
        ("run", "", "a folder"),
        ("begin_share", 1.0, "in [0, 1)"),
    ],
)
def test_a_value_out_of_range_is_refused_with_name_value_and_requirement(path: str, value: object, requirement: str) -> None:
    assert refusal(nested(path, value)) == f"{path} must be {requirement}, got {value!r}"


def test_settings_that_do_not_fit_together_are_refused() -> None:
    assert refusal({"model": {"experts": 4, "active": 5}}) == "model.active must be at most model.experts, got 5"
    with pytest.raises(ConfigError, match="sync.overlap must be below sync.every in lock-step, got 4"):
        SyncConfig(every=4, overlap=4, wait=True, quorum=0)
    with pytest.raises(ConfigError, match=r"sync.quorum must be 0 \(all\) in lock-step, got 1"):
        SyncConfig(wait=True, quorum=1)
    with pytest.raises(ConfigError, match="sync.begin.every must be at most sync.every, got 25"):
        SyncConfig(every=24, begin=BeginConfig(steps=10, every=25))
    SyncConfig(every=4, overlap=9, wait=False)


def test_a_configuration_made_in_python_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match="sync.fragments must be >= 1, got 0"):
        SyncConfig(fragments=0)
    with pytest.raises(ConfigError, match="sync.every must be >= 1, got -3"):
        dataclasses.replace(SyncConfig(), every=-3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncConfig().fragments = 3  # type: ignore[misc]


# ---------------------------------------------------------------- files


def test_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('algorithm = "streaming"\n[sync]\nfragments = 3\n[sync.begin]\nsteps = 9\n[data]\nsuffixes = [".c"]\n')
    config = load(path)
    assert config.algorithm == "streaming"
    assert (config.sync.fragments, config.sync.begin.steps, config.data.suffixes) == (3, 9, (".c",))
    assert config.train == TrainConfig()


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"run = ", "is not valid TOML"),
        (b"run = 'a'\nrun = 'b'", "is not valid TOML"),
        (b"run = '\xff\xfe'", "is not valid TOML"),
        (b"[sync]\nfragments = 0", "sync.fragments must be >= 1, got 0"),
        (b"[sync]\nwait = 1", "sync.wait must be bool, got 1"),
    ],
)
def test_a_faulty_file_is_refused_in_one_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at .*nowhere.toml"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(SkerryError, match="cannot be read"):
        load(tmp_path)


# ---------------------------------------------------------------- what a run is told


@pytest.mark.parametrize("algorithm", ["decoupled", "streaming", "diloco", "dp"])
def test_a_resolved_configuration_comes_back_from_json_unchanged(algorithm: str) -> None:
    values = {"algorithm": algorithm, "begin_share": 0.25, "data": {"suffixes": [".c", ".h"]}, "sync": {"outer_lr": 1}}
    config = from_mapping(Config, values).resolved()
    assert from_json(Config, to_json(config)) == config
    assert from_json(SyncConfig, to_json(config.sync)) == config.sync
    assert from_json(Config, to_json(config)).resolved() == config, "resolving twice changes nothing"


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        SyncConfig,
        fragments=st.integers(1, 500),
        every=st.integers(10, 1000),
        overlap=st.integers(0, 9),
        wait=st.booleans(),
        quorum=st.just(0),
        grace=st.floats(0, 0.99),
        outer_lr=st.floats(1e-3, 10),
        outer_momentum=st.floats(0, 0.999),
        adopt=st.sampled_from(["overwrite", "blend", "carry"]),
        budget_tokens=st.integers(0, 2**62),
        begin=st.builds(BeginConfig, steps=st.integers(0, 10**6), every=st.integers(1, 10), outer_lr=st.floats(1e-3, 10)),
    )
)
def test_any_settings_come_back_from_json_unchanged(sync: SyncConfig) -> None:
    assert from_json(SyncConfig, to_json(sync)) == sync


def test_json_that_is_none_is_an_error_of_ours() -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        from_json(SyncConfig, "{fragments: 3}")
    for text in ("[1]", "3", "null"):
        with pytest.raises(ConfigError, match="settings must be a table"):
            from_json(SyncConfig, text)
    with pytest.raises(ConfigError, match="fragmetns is not a setting"):
        from_json(SyncConfig, json.dumps({"fragmetns": 3}))


def test_resolving_fills_in_budget_beginning_and_islands() -> None:
    config = from_mapping(
        Config,
        {
            "begin_share": 0.5,
            "train": {"tokens": 64_000, "batch": 4},
            "model": {"context": 100},
            "islands": {"count": 8},
        },
    ).resolved()
    assert config.sync.budget_tokens == 64_000
    assert config.sync.start_with == 8
    assert config.sync.begin.steps == 10, "half the budget, in steps that all islands take together"


def test_a_run_begins_with_a_tenth_unless_told_otherwise() -> None:
    job = {"train": {"tokens": 64_000, "batch": 4}, "model": {"context": 100}, "islands": {"count": 8}}
    assert from_mapping(Config, job).resolved().sync.begin == BeginConfig(steps=2, every=4)
    assert from_mapping(Config, {**job, "begin_share": 0.0}).resolved().sync.begin.steps == 0
    assert from_mapping(Config, {**job, "sync": {"every": 2}}).resolved().sync.begin == BeginConfig(steps=2, every=2)
    assert from_mapping(Config, {**job, "sync": {"overlap": 5}}).resolved().sync.begin == BeginConfig(steps=2, every=10)
    assert from_mapping(Config, {**job, "sync": {"overlap": 15}}).resolved().sync.begin == BeginConfig(steps=2, every=24)
    with pytest.raises(ConfigError, match=r"sync.begin.every must be at most sync.every, got 8"):
        from_mapping(Config, {**job, "sync": {"every": 6, "begin": {"every": 8}}}).resolved()


def test_a_beginning_given_in_steps_goes_before_one_given_as_a_share() -> None:
    config = from_mapping(Config, {"begin_share": 0.5, "sync": {"begin": {"steps": 7}}}).resolved()
    assert config.sync.begin.steps == 7


def test_more_learners_than_islands_may_be_waited_for() -> None:
    config = from_mapping(Config, {"islands": {"count": 2}, "sync": {"start_with": 5}}).resolved()
    assert config.sync.start_with == 5


def test_each_algorithm_puts_in_place_what_defines_it_and_nothing_else() -> None:
    sync = SyncConfig(fragments=6, every=12, overlap=3, quorum=2, outer_lr=0.9, adopt="carry")
    assert sync.for_algorithm("decoupled") == sync
    assert sync.for_algorithm("dp") == sync
    assert sync.for_algorithm("streaming") == dataclasses.replace(sync, quorum=0, wait=True)
    assert sync.for_algorithm("diloco") == dataclasses.replace(sync, quorum=0, wait=True, fragments=1, overlap=0)


def test_an_overlap_that_lock_step_cannot_have_is_refused_when_it_is_asked_for() -> None:
    sync = SyncConfig(every=2, overlap=2)
    with pytest.raises(ConfigError, match="sync.overlap must be below sync.every"):
        sync.for_algorithm("streaming")
    assert sync.for_algorithm("diloco").overlap == 0


def test_the_shipped_configuration_is_valid() -> None:
    folder = Path(__file__).resolve().parent.parent / "configs"
    paths = sorted(folder.glob("*.toml"))
    assert paths
    for path in paths:
        load(path).resolved()


def test_the_corpus_of_the_standard_library_needs_no_path() -> None:
    assert DataConfig().path == ""
    assert DataConfig(corpus="tokens", path="/data").path == "/data"
