"""What learners say they did (learner/journal.py), as the syncer reads it: checked in shape and size, not in content."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

REMEMBERED = 10_000
MAX_BYTES = 1 << 20
NUMBERS = {"adopted": 4, "tokens": 2, "gaps": 2}
"""Whole numbers (or truth values) in an entry of each kind."""


class Journals:
    """Puts on the tape what is new of what processes say. They say it again until they know that it is written."""

    def __init__(self, retired: Callable[[str], tuple[str, ...]], record: Callable[[str, dict[str, Any]], None]) -> None:
        self._retired = retired
        """Of a learner's name: the processes that had it before."""
        self._record = record
        self._known: dict[str, int] = {}
        """Process → its steps up to which its journal was recorded."""

    def take(self, name: str, session: str, text: str) -> bool:
        """Whether it is a journal."""
        found = read_journal(text)
        if found is None:
            return False
        inherited = found.pop("inherited", None)
        owners = {owner for owner, _ in found.get("origin", ())}
        if inherited is not None and found["source"] == "own" and len(owners) == 1 and owners <= set(self._retired(name)):
            self._keep(name, owners.pop(), inherited)
        self._keep(name, session, found)
        return True

    def _keep(self, name: str, session: str, found: dict[str, Any]) -> None:
        known = self._known.get(session, -1)
        fresh = newer(found, known)
        if found["upto"] < known or (found["upto"] == known and not fresh["adopted"]):
            return
        if len(self._known) > REMEMBERED:
            self._known.clear()
        self._known[session] = found["upto"]
        self._record("journal", {"learner": name, "session": session, **fresh})


def read_journal(text: str) -> dict[str, Any] | None:
    """None if it is none."""
    try:
        return _checked(json.loads(text)) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None


def _checked(found: Any, inherits: bool = True) -> dict[str, Any] | None:
    if not isinstance(found, dict) or not all(_is_count(found.get(key)) for key in ("from", "upto")):
        return None
    kept = {key: found[key] for key in ("from", "upto")}
    for key, numbers in NUMBERS.items():
        entries = found.get(key)
        if not isinstance(entries, list) or not all(_is_row(entry, numbers) for entry in entries):
            return None
        kept[key] = entries
    data = found.get("data")
    if not isinstance(data, list) or not all(_is_taken(entry) for entry in data):
        return None
    kept["data"] = data
    if inherits and isinstance(found.get("source"), str):
        origin = found.get("origin")
        if not isinstance(origin, list) or not all(_is_origin(entry) for entry in origin):
            return None
        kept |= {"source": found["source"][:20], "origin": origin}
        kept["inherited"] = _checked(found.get("inherited"), inherits=False)
    return kept


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 53


def _is_row(entry: Any, numbers: int) -> bool:
    return isinstance(entry, list) and len(entry) == numbers and all(_is_count(value) for value in entry)


def _is_taken(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not _is_count(entry[0]) or not isinstance(entry[1], list):
        return False
    return bool(entry[1]) and all(
        isinstance(r, list) and len(r) == 3 and isinstance(r[0], str) and _is_count(r[1]) and _is_count(r[2]) for r in entry[1]
    )


def _is_origin(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _is_count(entry[1])


def newer(journal: dict[str, Any], known: int) -> dict[str, Any]:
    """Without what is known up to this many steps. Adoptions between two steps may come in two parts."""
    found = {**journal, "from": max(journal["from"], known)}
    found["adopted"] = [entry for entry in journal["adopted"] if entry[0] >= known]
    for key in ("tokens", "data"):
        found[key] = [entry for entry in journal[key] if entry[0] > known]
    return found
