"""What learners say they did (learner/journal.py), as the syncer reads it: checked in shape and size, not in content."""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 1 << 20
LISTS = ("adopted", "tokens", "data", "gaps")


def read_journal(text: str) -> dict[str, Any] | None:
    """None if it is none."""
    try:
        found = json.loads(text) if len(text) <= MAX_BYTES else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), int) for key in ("from", "upto")):
        return None
    for key in LISTS:
        entries = found.get(key)
        if not isinstance(entries, list) or not all(isinstance(e, list) and e and isinstance(e[0], int) for e in entries):
            return None
    return {key: found[key] for key in ("from", "upto", *LISTS)}


def newer(journal: dict[str, Any], known: int) -> dict[str, Any]:
    """Without what is known up to this many steps. Adoptions between two steps may come in two parts."""
    found = {**journal, "from": max(journal["from"], known)}
    found["adopted"] = [entry for entry in journal["adopted"] if entry[0] >= known]
    for key in ("tokens", "data"):
        found[key] = [entry for entry in journal[key] if entry[0] > known]
    return found


def read_origin(text: str) -> list[tuple[str, int]]:
    """Whose optimizer state it was, part by part; none if that is not said."""
    try:
        found = json.loads(text or "[]")
        return [(str(session), int(steps)) for session, steps in found][:100_000]
    except (ValueError, TypeError):
        return []
