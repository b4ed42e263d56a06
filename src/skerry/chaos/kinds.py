"""The kinds of faults: which parts they apply to, their parameter and its unit."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.errors import ConfigError

DIRECTIONS = ("both", "up", "down")


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


KINDS = {
    kind.name: kind
    for kind in (
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
    )
}
UNITS = ("x", "mbps", "ms", "bytes", "s")


def kind_named(name: str) -> Kind:
    if name not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {name!r}")
    return KINDS[name]
