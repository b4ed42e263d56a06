"""The kinds of faults: which parts they apply to, their parameter and its unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from skerry.errors import ConfigError
from skerry.registry import Registry

DIRECTIONS = ("both", "up", "down")
UNITS = ("x", "mbps", "ms", "bytes", "s")


class Parts(Protocol):
    """The processes of a run on this machine, `island-N` and `syncer`. Signals to a part that is not running have no effect.
    Killing a part that is down keeps it down for at least `down_s`."""

    def runs(self, part: str) -> bool: ...
    def kill(self, part: str, down_s: float) -> None: ...
    def signal(self, part: str, number: int) -> None: ...
    def pid(self, part: str) -> int | None:
        """The process id, or None if it does not run."""
        ...


@dataclass(frozen=True)
class Kind:
    name: str
    of_islands: bool = True
    of_syncer: bool = False
    link: bool = False
    """Applied by the proxy to the link between island and syncer."""
    inside: bool = False
    """Applied inside the process, which reads its faults from a file."""
    amount: str | None = None
    """Name of the kind's parameter in a plan; None if it has none."""
    unit: str = ""
    usual: float = 0.0
    above: float | None = None
    """Exclusive lower bound of the parameter. None allows anything but 0."""
    inject: Callable[[Parts, str, float], object] | None = None
    """A plugin's fault: does it to a part, by this amount. `skerry train` calls it on the thread that looks after all parts, so
    it must return at once. If it raises, that becomes an event and the run goes on."""
    heal: Callable[[Parts, str, float], object] | None = None
    """Undoes it, once for each time it was done, unless it lasts to the end of the run."""

    def __post_init__(self) -> None:
        if self.amount is not None and self.unit not in UNITS:
            raise ConfigError(f"the unit of fault {self.name!r} must be one of {', '.join(UNITS)}, got {self.unit!r}")


FAULTS: Registry[Kind] = Registry("fault")
for _kind in (
    Kind("kill"),
    Kind("freeze", of_syncer=True),
    Kind("slow", inside=True, amount="factor", unit="x", usual=4.0, above=1.0),
    Kind("cut", link=True),
    Kind("throttle", link=True, amount="mbps", unit="mbps", usual=1.0, above=0.0),
    Kind("delay", link=True, amount="ms", unit="ms", usual=100.0, above=0.0),
    Kind("drop", link=True),
    Kind("corrupt", link=True, amount="every_bytes", unit="bytes", usual=20_000.0, above=1.0),
    Kind("nan", inside=True),
    Kind("inf", inside=True),
    Kind("explode", inside=True, amount="factor", unit="x", usual=1000.0, above=1.0),
    Kind("stale", inside=True),
    Kind("kill_syncer", of_islands=False, of_syncer=True),
    Kind("fill_disk", of_islands=False, of_syncer=True, inside=True),
    Kind("clock", of_syncer=True, inside=True, amount="offset_s", unit="s", usual=30.0),
):
    FAULTS.add(_kind.name, _kind)


def kind_named(name: str) -> Kind:
    """Raises ConfigError."""
    return FAULTS.get(name, "kind")
