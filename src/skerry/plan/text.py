"""Parse the arguments of `skerry plan` and format its output."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from skerry.errors import ConfigError
from skerry.plan import planning
from skerry.plan.devices import DENSE_TFLOPS, USED, step_time_s
from skerry.plan.planning import Choice, Island

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_ISLAND = re.compile(r"(?:(?P<count>\d+)x)?(?P<what>[a-z][a-z0-9-]*|[\d.]+s)(?:@(?P<link>.+))?")


def number_of(text: str, what: str) -> float:
    """Parse a number such as `1.2b`, `350m` or `524288`."""
    found = re.fullmatch(r"([\d.]+)([kmbt]?)", text.lower().replace("_", "").replace(",", ""))
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{what} must be a number such as 350m or 1.2b, got {text!r}")
    return value


def link_of(text: str) -> tuple[float, float, float]:
    """Parse `DOWN[/UP][:RTT]` in Mbit/s and milliseconds, such as `500`, `500:40` or `500/100:40`."""
    found = re.fullmatch(r"([\d.]+)(?:/([\d.]+))?(?::([\d.]+))?", text)
    try:
        down = float(found[1]) if found else 0.0
        up = float(found[2]) if found and found[2] else down
        round_trip_s = float(found[3]) / 1000 if found and found[3] else 0.0
    except ValueError:
        up = down = round_trip_s = 0.0
    if up <= 0 or down <= 0:
        raise ConfigError(f"a link must be Mbit/s, with :MS for the round trip, such as 500:40 or 500/100:40; got {text!r}")
    return up, down, round_trip_s


def island_of(text: str, number: int, parameters: float, tokens: float, link: tuple[float, float, float] | None) -> Island:
    """Parse an island such as `8xh100` or `0.8s`, optionally with its link: `8xh100@500:40`."""
    found = _ISLAND.fullmatch(text.lower())
    if found is None:
        raise ConfigError(f"an island must be devices such as 8xh100, or a step time such as 0.8s, got {text!r}")
    what, count = found["what"], int(found["count"] or 1)
    if re.fullmatch(r"[\d.]+s", what):
        try:
            step_s = float(what[:-1])
        except ValueError:
            step_s = 0.0
    elif what in DENSE_TFLOPS:
        step_s = step_time_s(what, max(count, 1), parameters, tokens)
    else:
        raise ConfigError(f"device must be one of {', '.join(DENSE_TFLOPS)}, or a step time such as 0.8s; got {what!r}")
    if step_s <= 0:
        raise ConfigError(f"a step time must be > 0, got {text!r}")
    here = link_of(found["link"]) if found["link"] else link
    if here is None:
        raise ConfigError(f"{text} has no link: give --link 500:40, or --measured with the output of skerry doctor --json")
    return Island(f"island {number} ({text})", step_s, *here)


def measured_link(path: Path) -> tuple[float, float, float]:
    """Read a link from the output of `skerry doctor --json`."""
    try:
        found = json.loads(path.read_text())
        return float(found["up_mbit"]), float(found["down_mbit"]), float(found["round_trip_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not output of skerry doctor --json: {error}") from None


def plan_lines(parameters: float, islands: Sequence[Island], alternatives: int = 6) -> str:
    found = planning.choices(parameters, islands)
    best = found[0]
    lines = [f"model            {_amount(parameters)} parameters"]
    for island in islands:
        speed = f"{island.up_mbit:g} Mbit/s up, {island.down_mbit:g} down, round trip {1000 * island.round_trip_s:g} ms"
        lines.append(f"  {island.name:<22} {_seconds(island.step_s)} per step; {speed}")
    if not best.fits:
        lines.append(f"nothing fits: even {_settings(best)} {best.why_not}")
        lines.append("larger batches make steps longer, which leaves more time for each exchange")
        return "\n".join(lines)
    slow, quick = max(i.step_s for i in islands), min(i.step_s for i in islands)
    gap = f"; step times differ by {slow / quick:.1f}x: slow islands contribute fewer steps" if slow / quick > 1.05 else ""
    together = planning.data_parallel_utilisation(parameters, islands)
    lines += [
        f"use              {_settings(best)}",
        f"                 --sync.every {best.every} --sync.fragments {best.fragments} --sync.overlap {best.overlap} "
        f"--sync.quorum {planning.QUORUM} --sync.send {best.send} --sync.publish {best.publish}",
        f"utilisation      no step waits for a link; at least {100 * best.kept:.1f}% of the work reaches the model{gap}",
        f"links            {best.mbit:,.1f} Mbit/s for {best.worst}, {100 * best.load:.0f}% of its link; "
        f"{best.gbit:,.3g} Gbit/s at the syncer",
        f"exchange         {best.exchange_steps:.2f} of {best.every} steps of the fastest island",
        f"join             at most {_seconds(planning.join_s(parameters, islands))} to fetch the whole model",
        f"memory           {_bytes(planning.host_bytes(parameters, best))} on an island's host, "
        f"{_bytes(planning.syncer_bytes(parameters, best, len(islands)))} on the syncer's",
        f"data-parallel    would reach {100 * together:.1f}% over the same links",
        "alternatives",
    ]
    for choice in found[1 : 1 + alternatives]:
        lines.append(f"  {_settings(choice):<40} {choice.why_not}")
    too_large = [choice for choice in found[1 + alternatives :] if not choice.fits]
    lines += [f"  {_settings(choice):<40} {choice.why_not}" for choice in too_large[:alternatives]]
    lines.append(f"(assumes {100 * USED:.0f}% of peak speed; prefer measured step times)")
    return "\n".join(lines)


def _settings(choice: Choice) -> str:
    codecs = choice.send if choice.send == choice.publish else f"{choice.send} up, {choice.publish} down"
    return f"H = {choice.every}, P = {choice.fragments}, τ = {choice.overlap}, {codecs}"


def _amount(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
