"""What the tape of a run says about who did what, sorted for a replay; and where two tapes first differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skerry.config import Config, from_json
from skerry.core.leases.ranges import Range
from skerry.errors import ReplayError
from skerry.syncer.storage.run_folder import RunIdentity, read_checksums, read_identity, read_tape

BREAKS = {
    "restored": "was put back to an earlier state",
    "restored_from": "was restored from a snapshot",
    "recovered": "lost a version to a damaged file",
}
"""Entries after which weights do not follow from what is on the tape."""
KINDS = ("joined", "journal", "merged", *BREAKS)


@dataclass(frozen=True)
class Merged:
    """An outer step, as the tape has it."""

    data: dict[str, Any]
    checksum: int

    @property
    def fragment(self) -> int:
        return int(self.data["fragment"])

    @property
    def version(self) -> int:
        return int(self.data["version"])

    def __str__(self) -> str:
        return f"version {self.version} of fragment {self.fragment} in round {self.data['step']}"


@dataclass
class Process:
    """What the tape knows of one process of an island."""

    learner: str
    session: str
    platform: str = ""
    source: str = "fresh"
    origin: list[tuple[str, int]] = field(default_factory=list)
    covered: int = 0
    """Steps whose journal is there."""
    adopted: dict[int, list[tuple[int, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    """After how many steps → (fragment, version, whether it was taken whole), in order."""
    tokens: dict[int, int] = field(default_factory=dict)
    data: dict[int, list[Range]] = field(default_factory=dict)
    gives: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """After how many steps → (fragment, base) of contributions that were merged."""
    handed_on: set[int] = field(default_factory=set)
    """After how many steps its optimizer's state was taken over by another process."""

    @property
    def needed(self) -> int:
        """Steps of which something became of."""
        return max([*self.gives, *self.handed_on], default=0)

    def add(self, journal: dict[str, Any]) -> None:
        self.source = journal.get("source", self.source)
        self.origin = [(session, steps) for session, steps in journal.get("origin", self.origin)]
        if journal["from"] <= self.covered and not any(start < journal["upto"] for start, _ in journal["gaps"]):
            self.covered = max(self.covered, journal["upto"])
        for step, fragment, version, whole in journal["adopted"]:
            if (fragment, version, bool(whole)) not in self.adopted[step]:
                self.adopted[step].append((fragment, version, bool(whole)))
        self.tokens.update({step: tokens for step, tokens in journal["tokens"]})
        self.data.update({step: [Range(*found) for found in ranges] for step, ranges in journal["data"]})


class Recording:
    """The tape of a run, sorted by who did what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity: RunIdentity = read_identity(folder)
        if not self.identity.job_json:
            raise ReplayError(f"{folder} has no training job of its own; only runs of skerry train can be executed again")
        self.config: Config = from_json(Config, self.identity.job_json)
        if self.config.train.compile:
            raise ReplayError("a run with train.compile cannot be executed again yet: compiled code may sum in another order")
        self.processes: dict[str, Process] = {}
        found: list[dict[str, Any]] = []
        read_tape(folder, KINDS, lambda kind, data: found.append(data) if kind == "merged" else self._see(kind, data))
        self.merges = with_checksums(folder, found)
        for data in found:
            if not data["shares"]:
                raise ReplayError(f"the run in {folder} was put back to an earlier state, which cannot be executed again yet")
            for share in data["shares"]:
                self._of(share["session"], share["name"]).gives[share["upto"]].append((data["fragment"], share["base"]))
        for process in self.processes.values():
            for session, steps in process.origin:
                if session in self.processes:
                    self.processes[session].handed_on.add(steps)

    def _see(self, kind: str, data: dict[str, Any]) -> None:
        if kind in BREAKS:
            raise ReplayError(f"the run in {self.folder} {BREAKS[kind]}, which cannot be executed again yet")
        if kind == "joined":
            process = self._of(data["session"], data["learner"])
            process.platform = data.get("platform", "")
        elif kind == "journal":
            self._of(data["session"], data["learner"]).add(data)

    def _of(self, session: str, learner: str) -> Process:
        return self.processes.setdefault(session, Process(learner, session))


def first_difference(one: Path, other: Path) -> str | None:
    """Where two runs first differ, by their tapes, in words; None if one is the beginning of the other."""
    for folder in (one, other):
        read_identity(folder)  # says so if it is the folder of another version, with other checksums
    tapes = [_merged(folder) for folder in (one, other)]
    for number, (a, b) in enumerate(zip(*tapes, strict=False), 1):
        what = [key for key in ("fragment", "version", "step") if a.data[key] != b.data[key]]
        if what:
            return f"outer step {number}: {a} in {one}, {b} in {other}"
        shares = [{s["name"]: (s["base"], s["steps"], s["tokens"], s["upto"]) for s in m.data["shares"]} for m in (a, b)]
        if shares[0] != shares[1]:
            names = sorted(n for n in shares[0].keys() | shares[1].keys() if shares[0].get(n) != shares[1].get(n))
            return f"outer step {number}, {a}: other contributions, of {', '.join(names)}"
        if a.checksum != b.checksum:
            return f"outer step {number}, {a}: the same contributions by name and steps, but other values"
    return None


def _merged(folder: Path) -> list[Merged]:
    found: list[dict[str, Any]] = []
    read_tape(folder, ["merged"], lambda kind, data: found.append(data))
    return with_checksums(folder, found)


def with_checksums(folder: Path, merges: list[dict[str, Any]]) -> list[Merged]:
    """To be called after the tape was read: a running syncer writes both at once."""
    checksums = read_checksums(folder)
    return [Merged(data, checksums[data["fragment"], data["version"]]) for data in merges]
