"""What must hold, whatever happens: looked at as it happens, and once more on the tape when the run has ended."""

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
"""Of one inner step."""


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self._newest = [0] * world.sync.fragments
        """Of each fragment, what any learner was ever told."""
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        """(fragment, version) → as it was handed out."""
        self._uploads: dict[tuple[str, int, int], np.ndarray] = {}
        """(session, fragment, its steps up to then) → what was given."""
        self._answered: dict[tuple[str, int], int] = {}
        """(session, fragment) → the round it last answered on its present stream."""
        self._told: dict[tuple[str, int], tuple[str, int, int]] = {}
        """(session, position) → the lease it was told of."""
        self.leased = 0
        self.merges = 0
        self.history: list[tuple[Any, ...]] = []

    def _codec(self, name: str, fragment: int) -> Codec:
        layout = self._world.layout
        return fragment_codec(name, layout, layout.fragments[fragment])

    def fail(self, what: str) -> None:
        self._world.errors.append(what)

    def started(self, server: Any) -> None:
        for fragment, progress in enumerate(server.core.fragments):
            if progress.version < self._newest[fragment]:
                self.fail(f"fragment {fragment}: version {self._newest[fragment]} was announced, {progress.version} is there")

    # ------------------------------------------------------------ as it happens

    def told(self, session: str, message: Message) -> None:
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
                if ask.anew:  # the first was lost
                    self._answered.pop((session, ask.fragment), None)
                elif self._answered.get((session, ask.fragment)) == ask.round:
                    self.fail(f"round {ask.round} of fragment {ask.fragment} waits for a second answer of one learner")
        elif isinstance(message, pb.BulkToLearner) and message.HasField("reply") and message.reply.accepted:
            self._answered[session, message.reply.fragment] = message.reply.round

    def _announced(self, fragment: int, version: int) -> None:
        if version < self._newest[fragment]:
            self.fail(f"fragment {fragment} was announced at {self._newest[fragment]}, now at {version}")
        self._newest[fragment] = max(version, self._newest[fragment])

    def fetched(self, header: pb.Fetched, data: bytes) -> None:
        """A learner has all of a version."""
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
            self.fail(f"version {header.version} of fragment {header.fragment} was another one before")

    def stored(self, written: Written, folder: Path) -> None:
        """A version counts from now on. It is what learners will be given, whether or not any of them asks for it."""
        fragment, version = self._world.layout.fragments[written.order.fragment], written.order.version
        values = read_version(folder, fragment, {"file": written.file, "checksum": written.checksum}).public
        if not torch.equal(self._values.setdefault((fragment.index, version), values), values):
            self.fail(f"version {version} of fragment {fragment.index} was another one before")

    def held(self) -> None:
        """What learners hold as a version is what was handed out as that version."""
        for island in self._world.islands.values():
            if not island.alive or island.learner is None:
                continue
            for fragment, held in enumerate(island.learner._exchange.held):
                values = island.learner._replica.held(fragment)
                if held.version >= 0 and not torch.equal(values, self._values[fragment, held.version]):
                    self.fail(f"{island.name} holds something else as version {held.version} of fragment {fragment}")

    def given(self, session: str, message: Message) -> None:
        if isinstance(message, pb.ToSyncer) and message.HasField("nothing"):
            self._answered[session, message.nothing.fragment] = message.nothing.round

    def taken(self, session: str, header: pb.Upload, data: bytes) -> None:
        """The syncer has all of a contribution."""
        numel = self._values[header.fragment, header.base].numel()
        delta = self._codec(header.codec, header.fragment).decode(byte_tensor(memoryview(data)), numel)
        self._uploads[session, header.fragment, header.at_step] = delta.double().numpy()

    # ------------------------------------------------------------ on the tape

    def at_the_end(self, folder: Path) -> None:
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
        """The ledger adds up, and every lease that a learner was told of is in it."""
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
        """The weighted mean of what was given, in double precision, from the version before."""
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
