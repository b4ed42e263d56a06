"""A chaos plan, and how it is expanded into a list of faults.

Expansion is deterministic in the plan and the number of islands. Each island has its own random stream, so adding an island
does not change the faults of the others.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from dataclasses import dataclass

from skerry.chaos.kinds import DIRECTIONS, kind_named
from skerry.errors import ConfigError

DAY_S = 86_400.0
MOST_FAULTS = 100_000
"""Per island. A plan with more than this probably mixes up units."""


@dataclass(frozen=True)
class Fault:
    """One fault, injected into one part of a run."""

    kind: str
    """A name in FAULTS."""
    part: str
    """`island-2` or `syncer`."""
    at_s: float | None = None
    """Seconds after training began. If `at_step` is None too, the fault is injected immediately."""
    at_step: int | None = None
    """The run's step at which the fault is injected."""
    for_s: float = 0.0
    """Duration. 0 means until the end of the run, except that a killed part restarts at once."""
    amount: float = 0.0
    """The kind's parameter, in its unit; 0 for kinds without one."""
    direction: str = "both"
    """For link faults: `up` is from the island to the syncer."""
    before_step: int | None = None
    """The fault is skipped once the run has reached this step."""

    def __post_init__(self) -> None:
        kind = kind_named(self.kind)
        where = f"{self.kind} {self.part}"
        require(bool(re.fullmatch(r"island-\d+|syncer", self.part)), f"{where}: part", self.part, "island-N or syncer")
        if self.part not in ("syncer",) and not kind.of_islands:
            raise ConfigError(f"{self.kind} applies to the syncer, got {self.part!r}")
        if self.part == "syncer" and not kind.of_syncer:
            raise ConfigError(f"{self.kind} applies to an island, got 'syncer'")
        if self.at_s is not None and self.at_step is not None:
            raise ConfigError(f"{where}: give at_s or at_step, not both")
        at_s, at_step = self.at_s or 0.0, self.at_step or 0
        require(at_s >= 0 and math.isfinite(at_s), f"{where}: at_s", self.at_s, ">= 0")
        require(at_step >= 0, f"{where}: at_step", self.at_step, ">= 0")
        require(self.for_s >= 0 and math.isfinite(self.for_s), f"{where}: for_s", self.for_s, ">= 0")
        require(self.direction in DIRECTIONS, f"{where}: direction", self.direction, f"one of {', '.join(DIRECTIONS)}")
        require(
            kind.link or self.direction == "both", f"{where}: direction", self.direction, "left out: only link faults have one"
        )
        if kind.amount is None:
            require(self.amount == 0, f"{where}: amount", self.amount, "left out")
        else:
            if self.amount == 0:
                object.__setattr__(self, "amount", kind.usual)
            ok = math.isfinite(self.amount) and (kind.above is None or self.amount > kind.above)
            require(ok, f"{where}: {kind.amount}", self.amount, "finite" if kind.above is None else f"> {kind.above:g}")
        if self.for_s == 0 and self.part == "syncer" and self.kind in ("freeze", "fill_disk"):
            raise ConfigError(f"{where}: for_s must be > 0, or the run would never end, got 0")

    @property
    def what(self) -> str:
        """Kind and parameters, without part and time: `throttle 2mbps up`."""
        kind = kind_named(self.kind)
        words = [self.kind]
        if kind.amount is not None:
            words.append(f"{_number(self.amount)}{kind.unit}")
        if self.direction != "both":
            words.append(self.direction)
        return " ".join(words)

    @property
    def words(self) -> str:
        """The whole fault in short form; `parse_faults` reads it back as the same fault."""
        kind, *rest = self.what.split(" ", 1)
        words = " ".join([kind, self.part, *rest])
        if self.at_step is not None:
            words += f" @ step {self.at_step}"
        elif self.at_s is not None:
            words += f" @ {_number(self.at_s)}s"
        return words + (f" for {_number(self.for_s)}s" if self.for_s else "")


@dataclass(frozen=True)
class RandomFaults:
    """Random faults, drawn for every island."""

    mtbf_s: float
    """Mean time between failures of one island."""
    seed: int = 0
    return_s: float = 10.0
    """Mean duration of a fault."""
    distribution: str = "exponential"
    """Distribution of the duration: `exponential` or `fixed`."""
    kinds: tuple[str, ...] = ("kill",)
    """Drawn with equal probability."""
    until_s: float = DAY_S
    until_step: int | None = None

    def __post_init__(self) -> None:
        for name in ("mtbf_s", "return_s", "until_s"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"random.{name}", value, "> 0")
        choices = ("exponential", "fixed")
        require(self.distribution in choices, "random.distribution", self.distribution, f"one of {', '.join(choices)}")
        require(self.until_step is None or self.until_step >= 1, "random.until_step", self.until_step, ">= 1")
        require(bool(self.kinds), "random.kinds", self.kinds, "at least one kind")
        for kind in self.kinds:
            require(kind_named(kind).of_islands, "random.kinds", kind, "kinds that apply to islands")
        most = MOST_FAULTS * self.mtbf_s
        require(self.until_s <= most, "random.until_s", self.until_s, f"at most {most:g} with this mtbf_s")

    def drawn(self, island: int) -> list[Fault]:
        chance = random.Random(f"{self.seed}/{island}")
        faults: list[Fault] = []
        at_s = 0.0
        while True:
            at_s += chance.expovariate(1 / self.mtbf_s)
            kind = self.kinds[chance.randrange(len(self.kinds))]
            for_s = chance.expovariate(1 / self.return_s) if self.distribution == "exponential" else self.return_s
            if at_s >= self.until_s:
                return faults
            # At least a millisecond, because 0 means for ever.
            fault = Fault(kind, f"island-{island}", round(at_s, 3), for_s=max(0.001, round(for_s, 3)))
            faults.append(dataclasses.replace(fault, before_step=self.until_step))
            at_s += for_s


@dataclass(frozen=True)
class Plan:
    faults: tuple[Fault, ...] = ()
    random: RandomFaults | None = None

    def timed(self, islands: int) -> list[Fault]:
        """Every fault of a run with this many islands, in the order in which they are injected."""
        faults = list(self.faults)
        for fault in faults:
            check_part(fault, islands)
        if self.random is not None:
            faults += [fault for island in range(islands) for fault in self.random.drawn(island)]
        return sorted(faults, key=order)

    @property
    def needs_proxy(self) -> bool:
        """Whether any fault needs the proxy between islands and syncer."""
        kinds = {fault.kind for fault in self.faults} | set(self.random.kinds if self.random else ())
        return any(kind_named(kind).link for kind in kinds)


def check_part(fault: Fault, islands: int) -> None:
    if fault.part != "syncer" and int(fault.part.removeprefix("island-")) >= islands:
        raise ConfigError(f"{fault.words}: there are {islands} islands, island-0 to island-{islands - 1}")


def order(fault: Fault) -> tuple[float, int, str, str, float]:
    """Sort key: faults with a time first, then those with a step. The other fields make the order deterministic."""
    at_s = math.inf if fault.at_step is not None else fault.at_s or 0.0
    return (at_s, fault.at_step or 0, fault.part, fault.kind, fault.amount)


def require(ok: bool, name: str, value: object, requirement: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {requirement}, got {value!r}")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
