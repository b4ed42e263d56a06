"""The user's settings: frozen dataclasses, read from one TOML file and dotted command-line overrides.

`__post_init__` checks each value. `resolved` checks the rest, such as settings that a file may leave to the command line.
Nothing here imports torch, so that `skerry --help` answers quickly.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skerry.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Algorithm = Literal["decoupled", "streaming", "diloco", "dp"]


def _require(ok: bool, name: str, value: object, requirement: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {requirement}, got {value!r}")


@dataclass(frozen=True)
class BeginConfig:
    """Settings for the first part of a run. Most of the gap to data-parallel training arises in the first tenth, and merging
    more often there closes it."""

    steps: int = 0
    """Length of the beginning, in run steps. 0 starts the run with its final settings."""
    every: int = 4
    """H at the start. It doubles in stages of equal length until it reaches sync.every. Values far below the duration of an
    exchange do not help, because a merge overwrites the steps an island took during the exchange. If begin_share sets the
    length, the default of 4 is raised to twice sync.overlap."""
    outer_lr: float = 1.0
    """Outer learning rate at the start. It moves to sync.outer_lr as H grows."""
    outer_momentum: float = 0.0
    """Outer momentum at the start. It moves to sync.outer_momentum as H grows."""
    islands: int = 0
    """Number of islands that train during the beginning; the others wait until it is over. 0 means all."""

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "sync.begin.steps", self.steps, ">= 0")
        _require(self.every >= 1, "sync.begin.every", self.every, ">= 1")
        _require(self.outer_lr > 0, "sync.begin.outer_lr", self.outer_lr, "> 0")
        _require(0 <= self.outer_momentum < 1, "sync.begin.outer_momentum", self.outer_momentum, "in [0, 1)")
        _require(self.islands >= 0, "sync.begin.islands", self.islands, ">= 0")


@dataclass(frozen=True)
class SyncConfig:
    """How islands and syncer exchange the model. The syncer sends these settings to every island that joins."""

    fragments: int = 24
    """P: number of fragments the model is split into."""
    every: int = 24
    """H: inner steps between two merges of the same fragment."""
    overlap: int = 2
    """τ: inner steps an exchange may take while training continues."""
    quorum: int = 1
    """K: contributions a merge needs before its grace window opens; 0 means every live learner."""
    wait: bool = False
    """Lock-step: islands stop τ steps after a fragment was due until its merge has arrived. Without it they never wait."""
    grace: float = 0.9
    """γ: share of an exchange's spare time that a merge spends waiting for more contributions."""
    merge: str = "radial"
    """Merge rule: `radial` (radial-directional averaging), `mean` (the plain weighted mean), or a plugin's. Embeddings always
    use the plain mean."""
    outer: str = "nesterov"
    """Outer optimizer: `nesterov` (SGD with Nesterov momentum), or a plugin's."""
    outer_lr: float = 0.5
    """Learning rate of the outer step."""
    outer_momentum: float = 0.8
    """Momentum of the outer step."""
    damp_absent: bool = True
    """Scale a merge's progress by the share of asked learners that contributed, so that a single island cannot drag the
    model."""
    guard: str = "norm"
    """Decides which contributions are too unlike recent ones to be merged: `norm` goes by `outlier`, or a plugin's guard."""
    outlier: float = 10.0
    """Contributions this many times larger than the recent median are not merged; 0 accepts every finite contribution."""
    rollback: float = 0.0
    """If the loss reported by learners stays above this many times its best level, the model is rolled back to the last good
    copy; 0 disables it. Needs learners that report a loss."""
    strikes: int = 3
    """Unhealthy contributions in a row that put a learner in quarantine, and healthy ones that end it; 0 disables
    quarantine."""
    staleness: int = 1
    """How many versions old the base of a contribution may be."""
    adopt: Literal["overwrite", "blend", "carry"] = "overwrite"
    """What an island does with a merged fragment: replace its own values, mix the two, or add its own progress since the
    snapshot on top."""
    blend: float = 0.5
    """Weight of the global value when adopt = "blend"."""
    send: str = "bf16"
    """Codec of contributions, which are differences to the version the learner holds: `fp32`, `bf16`, `fp8`, `int8`, `int4`,
    `e3m0`, `topk1`, `topk3`, or a plugin's."""
    publish: str = "fp32"
    """Codec of merged fragments: values for fp32, differences to the previous version for all others."""
    feedback: Literal["auto", "always", "never"] = "auto"
    """Error feedback: add what the encoding of a contribution loses to a later one. `auto` does so for every
    codec with `needs_feedback`; of the built-in codecs these are topk1 and topk3."""
    start_with: int = 1
    """Learners that must have joined before any of them starts training."""
    budget_tokens: int = 0
    """Tokens after which the run ends; 0 means it runs until it is stopped."""
    silence_s: float = 10.0
    """Seconds without a sign of life after which a learner is no longer asked or waited for."""
    ahead_s: float = 120.0
    """Seconds of training that the data leased to a learner should cover, so that it does not run out of data while the syncer
    is down."""
    lease_s: float = 600.0
    """Seconds after which the leased data of a lost learner (see `silence_s`) goes to others. If the learner returns later, it
    starts over."""
    snapshot_every_s: float = 0.0
    """Seconds between snapshots of the whole run; 0 takes them only on request."""
    snapshots_kept: int = 3
    """Number of snapshots to keep; older ones are deleted."""
    pins: tuple[str, ...] = ()
    """Data pools that only one region may read, as "pool=region". They are leased only to learners of that region."""
    sinks: tuple[str, ...] = ()
    """Metrics sinks of plugins. The syncer passes every record of metrics.jsonl on to them."""
    options: tuple[str, ...] = ()
    """Settings of plugins, as "name=value"."""
    begin: BeginConfig = field(default_factory=BeginConfig)
    """Settings for the first part of the run, below."""

    def __post_init__(self) -> None:
        _require(self.fragments >= 1, "sync.fragments", self.fragments, ">= 1")
        _require(self.every >= 1, "sync.every", self.every, ">= 1")
        _require(self.overlap >= 0, "sync.overlap", self.overlap, ">= 0")
        _require(self.quorum >= 0, "sync.quorum", self.quorum, ">= 0")
        _require(0 <= self.grace < 1, "sync.grace", self.grace, "in [0, 1)")
        _require(self.outlier == 0 or self.outlier > 1, "sync.outlier", self.outlier, "0 or > 1")
        _require(self.rollback == 0 or self.rollback > 1, "sync.rollback", self.rollback, "0 or > 1")
        _require(
            self.rollback == 0 or self.adopt == "overwrite", "sync.rollback", self.rollback, '0 unless adopt = "overwrite"'
        )
        _require(self.strikes >= 0, "sync.strikes", self.strikes, ">= 0")
        _require(self.outer_lr > 0, "sync.outer_lr", self.outer_lr, "> 0")
        _require(0 <= self.outer_momentum < 1, "sync.outer_momentum", self.outer_momentum, "in [0, 1)")
        _require(self.staleness >= 0, "sync.staleness", self.staleness, ">= 0")
        _require(0 < self.blend <= 1, "sync.blend", self.blend, "in (0, 1]")
        _require(self.start_with >= 1, "sync.start_with", self.start_with, ">= 1")
        _require(self.budget_tokens >= 0, "sync.budget_tokens", self.budget_tokens, ">= 0")
        _require(self.silence_s > 0, "sync.silence_s", self.silence_s, "> 0")
        _require(self.ahead_s > 0, "sync.ahead_s", self.ahead_s, "> 0")
        _require(self.lease_s >= self.silence_s, "sync.lease_s", self.lease_s, "at least sync.silence_s")
        _require(self.snapshot_every_s >= 0, "sync.snapshot_every_s", self.snapshot_every_s, ">= 0")
        _require(self.snapshots_kept >= 1, "sync.snapshots_kept", self.snapshots_kept, ">= 1")
        _require(all("=" in pin for pin in self.pins), "sync.pins", self.pins, 'a list of "pool=region"')
        _require(all("=" in option for option in self.options), "sync.options", self.options, 'a list of "name=value"')
        _require(not self.wait or self.overlap < self.every, "sync.overlap", self.overlap, "below sync.every in lock-step")
        _require(not self.wait or self.quorum == 0, "sync.quorum", self.quorum, "0 (all) in lock-step")
        _require(
            not self.begin.steps or self.begin.every <= self.every, "sync.begin.every", self.begin.every, "at most sync.every"
        )

    def option(self, name: str, default: str) -> str:
        """A plugin's own setting, from `options`."""
        return dict(option.split("=", 1) for option in self.options).get(name, default)

    def for_algorithm(self, algorithm: Algorithm) -> SyncConfig:
        """These settings with those that define the algorithm overridden."""
        if algorithm == "streaming":
            return dataclasses.replace(self, quorum=0, wait=True)
        if algorithm == "diloco":
            return dataclasses.replace(self, quorum=0, wait=True, fragments=1, overlap=0)
        return self


@dataclass(frozen=True)
class ModelConfig:
    """The reference GPT. `size` picks a preset; `layers`, `width` and `heads` override parts of it."""

    size: str = "1m"
    """Preset, named by its number of parameters: 1m, 3m, 11m, 25m, 50m, 135m, 350m or 1b."""
    layers: int = 0
    """Number of blocks; 0 takes the preset's."""
    width: int = 0
    """Width of the residual stream; 0 takes the preset's."""
    heads: int = 0
    """Attention heads; 0 takes the preset's."""
    context: int = 128
    """Sequence length in tokens."""
    experts: int = 0
    """Experts per layer in place of the MLP; each token uses `active` of them. 0 means a dense MLP."""
    active: int = 2
    """Experts per token. Each expert has the dense MLP's width divided by this number, so a token uses as many parameters as in
    a dense model."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            _require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), ">= 0 (0 takes the preset's)")
        _require(self.context >= 2, "model.context", self.context, ">= 2")
        _require(self.experts == 0 or self.experts >= 2, "model.experts", self.experts, "0 (dense) or >= 2")
        _require(self.active >= 1, "model.active", self.active, ">= 1")
        _require(not self.experts or self.active <= self.experts, "model.active", self.active, "at most model.experts")


@dataclass(frozen=True)
class DataConfig:
    corpus: Literal["stdlib", "folder", "tokens"] = "stdlib"
    """Python's standard library source, a folder of text files, or token files (.npy or raw little-endian integers)."""
    path: str = ""
    """The folder, for `folder` and `tokens`."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Suffixes of the files to read, for `folder`."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    held_out: float = 0.02
    """Share of the files held out for validation."""
    token_bytes: Literal[2, 4] = 2
    """Bytes per token in raw token files."""
    pinned: tuple[str, ...] = ()
    """Additional folders that only one region reads, as "region=folder". Only islands of that region need the folder."""

    def __post_init__(self) -> None:
        _require(0 < self.held_out < 0.5, "data.held_out", self.held_out, "in (0, 0.5)")
        _require(all("=" in pin for pin in self.pinned), "data.pinned", self.pinned, 'a list of "region=folder"')

    def pinned_folders(self) -> list[tuple[str, str]]:
        """(region, folder) of each pinned folder."""
        pairs = [pin.split("=", 1) for pin in self.pinned]
        return [(region, folder) for region, folder in pairs]


@dataclass(frozen=True)
class TrainConfig:
    tokens: int = 2_500_000
    """Token budget of the run, summed over all islands."""
    batch: int = 8
    """Sequences per inner step of one island."""
    accumulate: int = 1
    """Micro-batches per inner step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Inner optimizer: AdamW, or Muon for matrices and AdamW for the rest."""
    lr: float = 3e-3
    """Peak learning rate. Tune it for data-parallel training."""
    weight_decay: float = 0.1
    """Weight decay of matrices."""
    beta2: float = 0.95
    """β₂ of AdamW."""
    warmup: float = 0.02
    """Share of the budget over which the learning rate warms up."""
    final_lr: float = 0.1
    """Final learning rate of the cosine decay, as a share of `lr`."""
    clip: float = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward and backward pass. Weights are always fp32."""
    compile: bool = False
    """Use torch.compile."""
    seed: int = 0
    """Seed of the initial weights and the data order."""

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, "train.tokens", self.tokens, ">= 1")
        _require(self.batch >= 1, "train.batch", self.batch, ">= 1")
        _require(self.accumulate >= 1, "train.accumulate", self.accumulate, ">= 1")
        _require(self.batch % self.accumulate == 0, "train.accumulate", self.accumulate, f"a divisor of {self.batch}")
        _require(self.lr > 0, "train.lr", self.lr, "> 0")
        _require(0 <= self.warmup < 1, "train.warmup", self.warmup, "in [0, 1)")
        _require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, ">= 0")
        _require(0 <= self.beta2 < 1, "train.beta2", self.beta2, "in [0, 1)")
        _require(0 <= self.final_lr <= 1, "train.final_lr", self.final_lr, "in [0, 1]")
        _require(self.clip >= 0, "train.clip", self.clip, ">= 0")


@dataclass(frozen=True)
class IslandsConfig:
    count: int = 4
    """Islands that `skerry train` starts on this machine."""
    threads: int = 0
    """CPU threads per island; 0 divides the machine's cores evenly."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` uses a GPU if there is one. With several GPUs `skerry train` assigns them to islands
    in turn, unless one is named."""
    regions: tuple[str, ...] = ()
    """Regions of the islands that `skerry train` starts, assigned in turn; none by default."""
    connections: int = 4
    """Connections over which an island spreads large fragments. A single connection cannot fill a long-distance link."""
    cap_mbit: float = 0.0
    """Bandwidth limit of one island in each direction, in Mbit/s; 0 means no limit."""
    shards: int = 0
    """Shard processes that hold the fragments for the syncer; 0 keeps all fragments in the syncer process."""
    restarts: int = 20
    """How often one island or the syncer is restarted before the run fails."""

    def __post_init__(self) -> None:
        _require(self.count >= 1, "islands.count", self.count, ">= 1")
        _require(self.threads >= 0, "islands.threads", self.threads, ">= 0")
        _require(self.connections >= 1, "islands.connections", self.connections, ">= 1")
        _require(self.cap_mbit >= 0, "islands.cap_mbit", self.cap_mbit, ">= 0")
        _require(self.shards >= 0, "islands.shards", self.shards, ">= 0")
        _require(self.restarts >= 0, "islands.restarts", self.restarts, ">= 0")


@dataclass(frozen=True)
class EvalConfig:
    every_tokens: int = 500_000
    """Tokens trained between two validations of the global model."""
    tokens: int = 32_768
    """Held-out tokens per validation during the run."""
    final_tokens: int = 131_072
    """Held-out tokens in the final validation."""
    sample_tokens: int = 240
    """Length of the text sample from the finished model, in tokens; 0 for none."""

    def __post_init__(self) -> None:
        _require(self.every_tokens >= 1, "eval.every_tokens", self.every_tokens, ">= 1")
        _require(self.tokens >= 1, "eval.tokens", self.tokens, ">= 1")
        _require(self.final_tokens >= 1, "eval.final_tokens", self.final_tokens, ">= 1")
        _require(self.sample_tokens >= 0, "eval.sample_tokens", self.sample_tokens, ">= 0")


@dataclass(frozen=True)
class Config:
    """A whole training job."""

    algorithm: Algorithm = "decoupled"
    """`decoupled` never waits; `streaming` and `diloco` run in lock-step; `dp` is plain data-parallel training."""
    run: str = "runs/default"
    """Run folder."""
    init: str = ""
    """A safetensors file with the initial weights. By default they are drawn from train.seed."""
    begin_share: float = 0.1
    """Length of the beginning as a share of the budget. Ignored if sync.begin.steps is set."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _require(bool(self.run), "run", self.run, "a folder")
        _require(0 <= self.begin_share < 1, "begin_share", self.begin_share, "in [0, 1)")

    def resolved(self) -> Config:
        """The config with derived settings filled in, as it is written to the run folder."""
        data = self.data  # checked only here, because the command line may still set the path
        _require(data.corpus == "stdlib" or bool(data.path), "data.path", data.path, f"set for corpus {data.corpus!r}")
        sync = self.sync.for_algorithm(self.algorithm)
        step_tokens = self.train.batch * self.model.context * self.islands.count
        begin = sync.begin
        if begin.steps == 0 and self.begin_share > 0:
            steps = int(self.begin_share * self.train.tokens / step_tokens)
            first = begin.every
            if first == BeginConfig.every:
                # The default adapts (an explicit value does not): at most sync.every, at least 2τ. More frequent merges would
                # overwrite most of the islands' work.
                first = min(max(first, 2 * sync.overlap), sync.every)
            begin = dataclasses.replace(begin, steps=steps, every=first)
        sync = dataclasses.replace(
            sync,
            begin=begin,
            budget_tokens=self.train.tokens,
            start_with=max(sync.start_with, self.islands.count),
            pins=tuple(f"{folder}={region}" for region, folder in self.data.pinned_folders()),
        )
        return dataclasses.replace(self, sync=sync)


def from_mapping(cls: type[Any], values: Mapping[str, Any], where: str = "") -> Any:
    """Build a config dataclass from plain values. Raises ConfigError naming any unknown key or wrong type."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key not in known:
            raise ConfigError(f"{name} is not a setting; known here: {', '.join(sorted(known))}")
        arguments[key] = _checked(hints[key], value, name)
    return cls(**arguments)


def _checked(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a table, got {value!r}")
        return from_mapping(typing.cast(type[Any], hint), value, f"{name}.")
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of strings, got {value!r}")
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name} must be {hint.__name__}, got {value!r}")
    return value


def load(path: Path) -> Config:
    """Read a TOML file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return typing.cast(Config, from_mapping(Config, values))


def to_json(config: object) -> str:
    """The config dataclass as JSON for `from_json`."""
    return json.dumps(dataclasses.asdict(typing.cast(Any, config)), indent=2)


def from_json(cls: type[Any], text: str) -> Any:
    """Build a config dataclass from JSON. Raises ConfigError."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"settings must be a table, got {text[:40]!r}")
    return from_mapping(cls, values)
