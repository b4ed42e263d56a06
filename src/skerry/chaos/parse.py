"""Read chaos plans from TOML files or from the short form. Every mistake is reported in one line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skerry.chaos.kinds import UNITS, kind_named
from skerry.chaos.plan import DAY_S, Fault, Plan, RandomFaults, require
from skerry.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = "kill island-2 @ step 120 for 5s"


def read_plan(given: str) -> Plan:
    """Read a plan from a TOML file (if `given` ends in .toml) or from the short form."""
    if given.endswith(".toml"):
        return load_plan(Path(given))
    return Plan(tuple(parse_faults(given)))


def load_plan(path: Path) -> Plan:
    try:
        with path.open("rb") as file:
            return plan_from(tomllib.load(file))
    except FileNotFoundError:
        raise ConfigError(f"no chaos plan at {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def plan_from(values: Mapping[str, Any]) -> Plan:
    _known(values, {"fault", "random"}, "")
    entries, chance = values.get("fault", []), values.get("random")
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"fault must be a list of tables, each begun with [[fault]], got {entries!r}")
    if chance is not None and not isinstance(chance, Mapping):
        raise ConfigError(f"random must be a table, got {chance!r}")
    faults = tuple(_fault_from(entry, f"fault[{number}].") for number, entry in enumerate(entries))
    return Plan(faults, None if chance is None else _random_from(chance))


def _fault_from(values: Mapping[str, Any], where: str) -> Fault:
    kind = kind_named(_typed(values, "kind", str, where, ""))
    _known(
        values,
        {"kind", "island", "part", "at_s", "at_step", "for_s", "direction", *([kind.amount] if kind.amount else [])},
        where,
    )
    if "island" in values and "part" in values:
        raise ConfigError(f"{where}island and {where}part must not be given together")
    part = _typed(values, "part", str, where, "syncer" if not kind.of_islands else "")
    if "island" in values:
        part = f"island-{_typed(values, 'island', int, where, 0)}"
    if not part:
        raise ConfigError(f"{where}island must be given for {kind.name}" + (', or part = "syncer"' if kind.of_syncer else ""))
    at_s, at_step = _typed(values, "at_s", float, where, None), _typed(values, "at_step", int, where, None)
    if at_s is None and at_step is None:
        raise ConfigError(f"{where}at_s or {where}at_step must be given")
    for_s, amount = _typed(values, "for_s", float, where, 0.0), 0.0
    if kind.amount and kind.amount in values:
        amount = _typed(values, kind.amount, float, where, 0.0)
        require(amount != 0, f"{where}{kind.amount}", amount, "other than 0")
    return Fault(kind.name, part, at_s, at_step, for_s, amount, _typed(values, "direction", str, where, "both"))


def _random_from(values: Mapping[str, Any]) -> RandomFaults:
    where = "random."
    _known(values, {field.name for field in dataclasses.fields(RandomFaults)}, where)
    if "mtbf_s" not in values:
        raise ConfigError("random.mtbf_s must be given")
    kinds = values.get("kinds", ["kill"])
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"random.kinds must be a list of strings, got {kinds!r}")
    return RandomFaults(
        _typed(values, "mtbf_s", float, where, 0.0),
        _typed(values, "seed", int, where, 0),
        _typed(values, "return_s", float, where, 10.0),
        _typed(values, "distribution", str, where, "exponential"),
        tuple(kinds),
        _typed(values, "until_s", float, where, DAY_S),
        _typed(values, "until_step", int, where, None),
    )


_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_WORDS = re.compile(
    r"(?P<kind>[a-z_]+)(?:\s+(?P<part>island-\d+|syncer))?"
    rf"(?:\s+(?P<amount>{_NUMBER})\s*(?P<unit>{'|'.join(UNITS)})?)?(?:\s+(?P<direction>up|down|both))?"
    rf"(?:\s*@\s*(?:step\s+(?P<step>\d+)|(?P<at>{_NUMBER})\s*s))?(?:\s+for\s+(?P<for>{_NUMBER})\s*s)?",
    re.IGNORECASE,
)


def parse_faults(text: str) -> list[Fault]:
    """Parse faults like `kill island-2 @ step 120, freeze island-1 @ 30s for 5s`. Without `@` a fault is injected at once."""
    faults = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    if not faults:
        raise ConfigError(f"no fault in {text!r}; write it like: {EXAMPLE}")
    return faults


def _parse(text: str) -> Fault:
    found = _WORDS.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not a fault; write it like: {EXAMPLE}")
    name, part = found["kind"].lower(), (found["part"] or "").lower()
    if name == "kill" and part == "syncer":
        name = "kill_syncer"
    kind = kind_named(name)
    if not part:
        if kind.of_islands:
            raise ConfigError(f"{text!r} names no island; write it like: {EXAMPLE}")
        part = "syncer"
    amount = 0.0
    if found["amount"] is not None:
        if kind.amount is None:
            raise ConfigError(f"{text!r}: {name} takes no number, got {found['amount']}")
        if found["unit"] and found["unit"].lower() != kind.unit:
            raise ConfigError(f"{text!r}: {kind.amount} must be in {kind.unit}, got {found['unit']}")
        amount = float(found["amount"])
        require(amount != 0, f"{text!r}: {kind.amount}", amount, "other than 0")
    return Fault(
        name,
        part,
        float(found["at"]) if found["at"] else None,
        int(found["step"]) if found["step"] else None,
        float(found["for"] or 0.0),
        amount,
        (found["direction"] or "both").lower(),
    )


def _known(values: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}{key} is not a setting; known here: {', '.join(sorted(known))}")


def _typed(values: Mapping[str, Any], key: str, wanted: type, where: str, default: Any) -> Any:
    if key not in values:
        return default
    value = values[key]
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ConfigError(f"{where}{key} must be {wanted.__name__}, got {value!r}")
    return value
