"""Calls for operators and tools: describe the run, close it, take a snapshot, record a fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from skerry.config import to_json
from skerry.core import messages as m
from skerry.core import records
from skerry.core.schema import MalformedRecord, read_record
from skerry.errors import SkerryError
from skerry.syncer.decisions import Decisions
from skerry.syncer.storage.run_folder import RunIdentity
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL

ACCEPTED = (records.FaultInjected, records.FaultHealed, records.PartRestarted)
"""Kinds of records that `tell` accepts."""
MAX_RECORD_BYTES = 4096
FLUSH_S = 2.0
"""How long `tell` waits for durability. After a longer wait the caller would send the record again."""


class OperatorService:
    def __init__(
        self,
        identity: RunIdentity,
        decisions: Decisions,
        take_snapshot: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._identity, self._decisions, self._take_snapshot = identity, decisions, take_snapshot

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.RunDescription:
        return pb.RunDescription(
            protocol=PROTOCOL,
            run_id=self._identity.run_id,
            sync_json=to_json(self._identity.sync),
            job_json=self._identity.job_json,
            now=time.time(),
        )

    async def close_run(self, request: pb.CloseRequest, context: Any) -> pb.CloseReply:
        await self._check_run(request.run_id, context)
        self._decisions.dispatch(m.CloseRequested())
        return pb.CloseReply()

    async def tell(self, request: pb.TellRequest, context: Any) -> pb.TellReply:
        await self._check_run(request.run_id, context)
        try:
            record = read_record(request.kind, json.loads(request.data_json[:MAX_RECORD_BYTES]))
        except (ValueError, MalformedRecord) as error:
            record, why = None, f": {error}"
        else:
            why = ""
        if not isinstance(record, ACCEPTED):
            kinds = ", ".join(kind.kind for kind in ACCEPTED)
            reason = f"the record must be one of {kinds}, as a JSON object of at most {MAX_RECORD_BYTES} bytes{why}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
            return pb.TellReply()
        self._decisions.record(record)
        # The caller may be about to kill this process. If the disk rejects writes, the record stays in memory.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._decisions.tape.flush(), FLUSH_S)
        return pb.TellReply()

    async def snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotReply:
        await self._check_run(request.run_id, context)
        try:
            facts = await self._take_snapshot()
        except SkerryError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        return pb.SnapshotReply(facts_json=json.dumps(facts))

    async def _check_run(self, run_id: str, context: Any) -> None:
        if run_id != self._identity.run_id:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this syncer serves another run")
