"""The invariants of a run, checked while it runs and on the tape after it ended."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from google.protobuf.message import Message

from skerry.core import records
from skerry.core.schema import TapeRecord
from skerry.observe.ledger import audit_run
from skerry.syncer.storage.run_folder import read_tape
from skerry.syncer.storage.store import Written
from skerry.syncer.storage.version_file import read_version
from skerry.tensors.codecs.codec import Codec, byte_tensor
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.wire import skerry_pb2 as pb

if TYPE_CHECKING:
    from simulation.world import World

TOKENS = 10
"""Tokens per inner step."""


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self._newest = [0] * world.sync.fragments
        """Per fragment: the newest version announced to any learner."""
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        """(fragment, version) → its published values."""
        self._uploads: dict[tuple[str, int, int], np.ndarray] = {}
        """(session, fragment, at_step) → the contribution."""
        self._answered: dict[tuple[str, int], int] = {}
        """(session, fragment) → the round last answered on the current stream."""
        self._told: dict[tuple[str, int], tuple[str, int, int]] = {}
        """(session, position) → the lease sent to it."""
        self.leased = 0
        self.merges = 0
        self.history: list[tuple[Any, ...]] = []

    def _codec(self, name: str, fragment: int) -> Codec:
        layout = self._world.layout
        return fragment_codec(name, layout, layout.fragments[fragment])

    def fail(self, what: str) -> None:
        self._world.errors.append(what)

    def started(self, server: Any) -> None:
        """A restarted syncer has every version that was announced."""
        for fragment, progress in enumerate(server.core.fragments):
            if progress.version < self._newest[fragment]:
                self.fail(
                    f"fragment {fragment}: version {self._newest[fragment]} was announced, the syncer has {progress.version}"
                )

    # ------------------------------------------------------------ during the run

    def told(self, session: str, message: Message) -> None:
        """Versions never go back, and nobody is asked twice for the same answer."""
        if isinstance(message, pb.ToLearner):
            if message.HasField("announce"):
                self._announced(message.announce.fragment, message.announce.version)
            elif message.HasField("welcome"):
                for fragment, version in enumerate(message.welcome.versions):
                    self._announced(fragment, version)
                    self._answered.pop((session, fragment), None)
            elif message.HasField("lease"):
                self._told[session, message.lease.position] = (message.lease.pool, message.lease.start, message.lease.count)
            elif message.HasField("ask"):
                ask = message.ask
                if ask.anew:  # the first answer was lost
                    self._answered.pop((session, ask.fragment), None)
                elif self._answered.get((session, ask.fragment)) == ask.round:
                    self.fail(f"round {ask.round} of fragment {ask.fragment} waits for a second answer from one learner")
        elif isinstance(message, pb.BulkToLearner) and message.HasField("reply") and message.reply.accepted:
            self._answered[session, message.reply.fragment] = message.reply.round

    def _announced(self, fragment: int, version: int) -> None:
        if version < self._newest[fragment]:
            self.fail(f"fragment {fragment} was announced as version {self._newest[fragment]}, then as {version}")
        self._newest[fragment] = max(version, self._newest[fragment])

    def fetched(self, header: pb.Fetched, data: bytes) -> None:
        """A fetched version has the same values for every learner."""
        if header.fragment >= self._world.sync.fragments:
            return
        key = (header.fragment, header.version)
        received = byte_tensor(memoryview(data))
        if header.HasField("since"):
            values = self._values[header.fragment, header.since]
            for difference in torch.split(received, len(data) // (header.version - header.since)):
                values = values + self._codec(header.codec, header.fragment).decode(difference, values.numel())
        else:
            values = received.view(torch.float32)
        if not torch.equal(self._values.setdefault(key, values), values):
            self.fail(f"version {header.version} of fragment {header.fragment} has changed")

    def stored(self, written: Written, folder: Path) -> None:
        """A stored version has the values that learners fetch."""
        fragment, version = self._world.layout.fragments[written.order.fragment], written.order.version
        values = read_version(folder, fragment, {"file": written.file, "checksum": written.checksum}).public
        if not torch.equal(self._values.setdefault((fragment.index, version), values), values):
            self.fail(f"version {version} of fragment {fragment.index} has changed")

    def held(self) -> None:
        """Learners hold the published values of their versions."""
        for island in self._world.islands.values():
            if not island.alive or island.learner is None:
                continue
            for fragment, held in enumerate(island.learner._exchange.held):
                values = island.learner._replica.held(fragment)
                if held.version >= 0 and not torch.equal(values, self._values[fragment, held.version]):
                    self.fail(f"{island.name} holds wrong values as version {held.version} of fragment {fragment}")

    def given(self, session: str, message: Message) -> None:
        """Remember answers without progress."""
        if isinstance(message, pb.ToSyncer) and message.HasField("nothing"):
            self._answered[session, message.nothing.fragment] = message.nothing.round

    def taken(self, session: str, header: pb.Upload, data: bytes) -> None:
        """Remember a contribution that the syncer has received completely."""
        numel = self._values[header.fragment, header.base].numel()
        delta = self._codec(header.codec, header.fragment).decode(byte_tensor(memoryview(data)), numel)
        self._uploads[session, header.fragment, header.at_step] = delta.double().numpy()

    # ------------------------------------------------------------ after the run

    def at_the_end(self, folder: Path) -> None:
        """The tape has every announced version, in order, and counts every step at most once."""
        database = sqlite3.connect(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=ro", uri=True)
        try:
            rows = database.execute("SELECT data FROM tape WHERE kind = 'merged' ORDER BY seq").fetchall()
            found = dict(database.execute("SELECT fragment, max(version) FROM versions GROUP BY fragment").fetchall())
        finally:
            database.close()
        merges = [json.loads(data) for (data,) in rows]
        self.merges = len(merges)
        self.history = [(merge["fragment"], merge["version"], merge["round"], merge["shares"]) for merge in merges]
        for fragment, newest in enumerate(self._newest):
            if found[fragment] < newest:
                self.fail(f"fragment {fragment}: version {newest} was announced and is lost")
        self._check_ledger(folder)
        numbers: dict[int, int] = defaultdict(int)
        covered: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for merge in merges:
            fragment = merge["fragment"]
            numbers[fragment] += 1
            if merge["version"] != numbers[fragment]:
                self.fail(f"fragment {fragment}: version {merge['version']} on the tape after {numbers[fragment] - 1}")
            for share in merge["shares"]:
                covered[share["session"], fragment].append((share["at_step"] - share["steps"], share["at_step"]))
                self._check_share(share)
            self._check_values(merge)
        for (session, fragment), spans in covered.items():
            for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
                if start < end:
                    self.fail(f"steps {start + 1} to {end} of session {session} are in fragment {fragment} twice")

    def _check_ledger(self, folder: Path) -> None:
        """The ledger adds up, and every lease that was sent to a learner is on the tape."""
        ledger = audit_run(folder)
        self.leased = ledger.leased
        for what in ledger.discrepancies:
            self.fail(f"the ledger does not add up: {what}")
        written: dict[str, dict[int, tuple[str, int]]] = defaultdict(dict)

        def see(record: TapeRecord) -> None:
            assert isinstance(record, records.Leased)
            for place in range(record.count):
                written[record.session][record.position + place] = (record.pool, record.start + place)

        read_tape(folder, [records.Leased], see)
        for (session, position), (pool, start, count) in self._told.items():
            for place in range(count):
                if written[session].get(position + place) != (pool, start + place):
                    self.fail(f"sample {start + place} was leased to {session} and is not on the tape")

    def _check_share(self, share: dict[str, Any]) -> None:
        weight = TOKENS * share["tokens"]  # tokens times tokens per step
        if share["tokens"] != TOKENS * share["steps"] or share["weight"] != weight:
            self.fail(f"a wrong weight: {share}")

    def _check_values(self, merge: dict[str, Any]) -> None:
        """A version is the previous one minus the weighted mean of the contributions, computed in double precision."""
        fragment, version = merge["fragment"], merge["version"]
        before, after = self._values.get((fragment, version - 1)), self._values.get((fragment, version))
        if self._world.sync.publish != "fp32":
            return
        deltas = [self._uploads.get((share["session"], fragment, share["at_step"])) for share in merge["shares"]]
        if before is None or after is None or any(delta is None for delta in deltas):
            return
        weights = np.array([share["weight"] for share in merge["shares"]])
        mean = sum(w * d for w, d in zip(weights / weights.sum(), deltas, strict=True) if d is not None)
        expected = before.double().numpy() - merge["outer_lr"] * merge["presence"] * mean
        if not np.allclose(after.double().numpy(), expected, rtol=1e-4, atol=1e-6):
            self.fail(f"version {version} of fragment {fragment} is not what was merged: {after.double().numpy() - expected}")
