"""What a user can set: frozen dataclasses, read from one TOML file and dotted command-line overrides.

Checks live in `__post_init__`; what a file may leave to the command line is checked by `resolved`. Nothing here imports torch:
the command line must answer `--help` at once.
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
CodecName = Literal["fp32", "bf16", "fp8", "int8", "int4", "e3m0", "topk1", "topk3"]


def _require(ok: bool, name: str, value: object, requirement: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {requirement}, got {value!r}")


@dataclass(frozen=True)
class BeginConfig:
    """How a run begins. Most of the gap to data-parallel training is made in the first tenth, where merging often pays."""

    steps: int = 0
    """Over how many steps of the run the beginning lasts; 0 means the run starts with its final settings."""
    every: int = 4
    """H at the very start; it doubles in equal stretches until it reaches sync.every. Much shorter than the time an
    exchange takes is of no use: what an island does meanwhile is overwritten. Where begin_share gives the steps, 4 stands for
    twice sync.overlap if that is more."""
    outer_lr: float = 1.0
    """Outer learning rate at the very start; it moves to sync.outer_lr as H grows."""
    outer_momentum: float = 0.0
    """Outer momentum at the very start; it moves to sync.outer_momentum as H grows."""
    islands: int = 0
    """How many islands may train during the beginning; the others wait until it is over. 0 means all."""

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "sync.begin.steps", self.steps, ">= 0")
        _require(self.every >= 1, "sync.begin.every", self.every, ">= 1")
        _require(self.outer_lr > 0, "sync.begin.outer_lr", self.outer_lr, "> 0")
        _require(0 <= self.outer_momentum < 1, "sync.begin.outer_momentum", self.outer_momentum, "in [0, 1)")
        _require(self.islands >= 0, "sync.begin.islands", self.islands, ">= 0")


@dataclass(frozen=True)
class SyncConfig:
    """How islands and syncer exchange the model. All islands of a run are told these by the syncer."""

    fragments: int = 24
    """P: into how many fragments the model is split."""
    every: int = 24
    """H: inner steps between two merges of the same fragment."""
    overlap: int = 2
    """τ: inner steps an exchange may take while training goes on."""
    quorum: int = 1
    """K: contributions a merge needs before its grace window opens; 0 means every live learner."""
    wait: bool = False
    """Islands stop τ steps after a fragment was due until its merge has arrived (lock-step), instead of never waiting."""
    grace: float = 0.9
    """γ: share of the spare time of an exchange that a merge spends waiting for more contributions."""
    merge: Literal["radial", "mean"] = "radial"
    """Radial-directional averaging or the plain weighted mean; embeddings always use the plain mean."""
    outer_lr: float = 0.5
    """Learning rate of the outer Nesterov step."""
    outer_momentum: float = 0.8
    """Momentum of the outer Nesterov step."""
    damp_absent: bool = True
    """Scale the progress by the share of asked learners that are in the merge, so that one island cannot drag the model."""
    outlier: float = 10.0
    """Contributions this many times larger than the median of recent ones are not merged; 0 lets everything finite pass."""
    rollback: float = 0.0
    """If the loss that learners report stays above this many times its best level, the model is put back to what it was when
    all was well; 0 means never. Needs learners that report a loss."""
    strikes: int = 3
    """After this many unhealthy contributions in a row a learner is in quarantine until it has sent as many healthy ones; 0
    means never."""
    staleness: int = 1
    """How many versions behind the current one the base of a contribution may be."""
    adopt: Literal["overwrite", "blend", "carry"] = "overwrite"
    """What an island does with a merged fragment: take it, mix it in, or add its progress since the snapshot to it."""
    blend: float = 0.5
    """Share of the global value when adopt = "blend"."""
    send: CodecName = "bf16"
    """Encoding of contributions, which are differences to the version the learner holds."""
    publish: CodecName = "fp32"
    """Encoding of merged fragments: values in fp32, differences to the version before in all others."""
    feedback: Literal["auto", "always", "never"] = "auto"
    """Whether what the encoding of a contribution leaves out is added to the next one. By itself for topk1 and topk3."""
    start_with: int = 1
    """How many learners must have joined before any of them starts training."""
    budget_tokens: int = 0
    """Tokens after which the run ends; 0 means it goes on until it is stopped."""
    silence_s: float = 10.0
    """A learner not heard of for this long is no longer waited for or asked."""
    ahead_s: float = 120.0
    """For how long the data leased to a learner should last: it must never wait for more, not even while the syncer is away."""
    lease_s: float = 600.0
    """Data leased to a learner that was given up (`silence_s`) and stays away for this long is given to others. If it returns,
    it starts over."""
    snapshot_every_s: float = 0.0
    """How often a snapshot of the whole run is taken; 0 means only when it is asked for."""
    snapshots_kept: int = 3
    """How many of the newest snapshots are kept."""
    pins: tuple[str, ...] = ()
    """Data that only some may read, as "pool=region": leased to learners of that region alone."""
    begin: BeginConfig = field(default_factory=BeginConfig)
    """How the run begins, below."""

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
        _require(not self.wait or self.overlap < self.every, "sync.overlap", self.overlap, "below sync.every in lock-step")
        _require(not self.wait or self.quorum == 0, "sync.quorum", self.quorum, "0 (all) in lock-step")
        _require(
            not self.begin.steps or self.begin.every <= self.every, "sync.begin.every", self.begin.every, "at most sync.every"
        )

    def for_algorithm(self, algorithm: Algorithm) -> SyncConfig:
        """The same settings with what defines the named algorithm put in place."""
        if algorithm == "streaming":
            return dataclasses.replace(self, quorum=0, wait=True)
        if algorithm == "diloco":
            return dataclasses.replace(self, quorum=0, wait=True, fragments=1, overlap=0)
        return self


@dataclass(frozen=True)
class ModelConfig:
    """The reference GPT. `size` picks a preset; any number given beside it replaces the preset's."""

    size: str = "1m"
    """A preset by its number of parameters: 1m, 3m, 11m, 25m, 135m, ..."""
    layers: int = 0
    """Blocks; 0 takes the preset's, as for the next two."""
    width: int = 0
    """Of the residual stream."""
    heads: int = 0
    """Of attention."""
    context: int = 128
    """Tokens a sequence holds."""
    experts: int = 0
    """Experts in place of each layer's MLP, of which every token uses `active`; 0 means one MLP for all tokens."""
    active: int = 2
    """Experts that a token uses. Each is the dense MLP's width divided by this, so a token uses as many parameters."""

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
    """The standard library's own source, a folder of text files, or token files (.npy or raw little-endian integers)."""
    path: str = ""
    """The folder, for `folder` and `tokens`."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files of a folder are read."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    held_out: float = 0.02
    """Share of files kept for validation."""
    token_bytes: Literal[2, 4] = 2
    """Width of raw token files."""
    pinned: tuple[str, ...] = ()
    """More folders of the same kind, each read by islands of one region alone, as "region=folder". Only they need it."""

    def __post_init__(self) -> None:
        _require(0 < self.held_out < 0.5, "data.held_out", self.held_out, "in (0, 0.5)")
        _require(all("=" in pin for pin in self.pinned), "data.pinned", self.pinned, 'a list of "region=folder"')

    def pinned_folders(self) -> list[tuple[str, str]]:
        """Region and folder of each."""
        pairs = [pin.split("=", 1) for pin in self.pinned]
        return [(region, folder) for region, folder in pairs]


@dataclass(frozen=True)
class TrainConfig:
    tokens: int = 2_500_000
    """The run's budget: tokens trained on, over all islands."""
    batch: int = 8
    """Sequences in one inner step of one island."""
    accumulate: int = 1
    """Micro-batches an inner step is split into."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Of islands: AdamW, or Muon for matrices with AdamW for the rest."""
    lr: float = 3e-3
    """The highest learning rate; tune it for data-parallel training."""
    weight_decay: float = 0.1
    """Of matrices."""
    beta2: float = 0.95
    """Of AdamW."""
    warmup: float = 0.02
    """Share of the budget over which the learning rate rises."""
    final_lr: float = 0.1
    """Share of `lr` at which the cosine decay ends."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of forward and backward passes; weights are always fp32."""
    compile: bool = False
    """Whether to use torch.compile."""
    seed: int = 0
    """Of initial weights and of the order of data."""

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
    """CPU threads of one island; 0 shares the machine's cores out."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU where there is one. If there are several, `skerry train` gives them to
    islands in turn, unless one is named."""
    regions: tuple[str, ...] = ()
    """Regions the islands that `skerry train` starts belong to, in turn; none by default."""
    connections: int = 4
    """Over how many connections an island's large fragments are spread; one alone cannot fill a long link."""
    cap_mbit: float = 0.0
    """Mbit/s that one island may use each way; 0 means no limit."""
    shards: int = 0
    """Processes over which the syncer's fragments are spread; with 0 the syncer has all of them itself."""
    restarts: int = 20
    """How often one island or the syncer is started again before the run is given up."""

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
    """How often the global model is validated while the run goes on."""
    tokens: int = 32_768
    """Held-out tokens of one validation during the run."""
    final_tokens: int = 131_072
    """Held-out tokens of the last validation."""
    sample_tokens: int = 240
    """Length of the sample the finished model writes; 0 for none."""

    def __post_init__(self) -> None:
        _require(self.every_tokens >= 1, "eval.every_tokens", self.every_tokens, ">= 1")
        _require(self.tokens >= 1, "eval.tokens", self.tokens, ">= 1")
        _require(self.final_tokens >= 1, "eval.final_tokens", self.final_tokens, ">= 1")
        _require(self.sample_tokens >= 0, "eval.sample_tokens", self.sample_tokens, ">= 0")


@dataclass(frozen=True)
class Config:
    """A whole training job."""

    algorithm: Algorithm = "decoupled"
    """`decoupled` never waits; `streaming` and `diloco` go in lock-step; `dp` is plain data-parallel training."""
    run: str = "runs/default"
    """Folder of the run."""
    init: str = ""
    """A safetensors file to start from, instead of fresh weights from train.seed."""
    begin_share: float = 0.1
    """Share of the budget the beginning lasts; sets sync.begin.steps when that is 0."""
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
        """With everything derived filled in: the form that is written into the run folder."""
        # Only now: the file may leave it to the command line.
        data = self.data
        _require(data.corpus == "stdlib" or bool(data.path), "data.path", data.path, f"set for corpus {data.corpus!r}")
        sync = self.sync.for_algorithm(self.algorithm)
        step_tokens = self.train.batch * self.model.context * self.islands.count
        begin = sync.begin
        if begin.steps == 0 and self.begin_share > 0:
            steps = int(self.begin_share * self.train.tokens / step_tokens)
            first = begin.every
            if first == BeginConfig.every:
                # Unlike a number that was asked for the default gives way, to a smaller H, and to a longer exchange: of merges
                # that come more often than every 2τ steps most islands' work would be overwritten.
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
    """A config dataclass from plain values; unknown keys and wrong types are errors that name the key."""
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
    """Read a TOML file."""
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
    """A config dataclass as JSON that `from_json` reads back."""
    return json.dumps(dataclasses.asdict(typing.cast(Any, config)), indent=2)


def from_json(cls: type[Any], text: str) -> Any:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"settings must be a table, got {text[:40]!r}")
    return from_mapping(cls, values)
