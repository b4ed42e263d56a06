"""What operators and tools may ask of a running syncer: describe it, close the run, take a snapshot, write a fault down."""

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

TOLD = (records.FaultInjected, records.FaultHealed, records.PartRestarted)
"""Records that may be written from outside."""
MAX_TOLD = 4096
TOLD_S = 2.0
"""A caller that waits longer than this for durability would take the record for lost, and tell it again."""


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
            record = read_record(request.kind, json.loads(request.data_json[:MAX_TOLD]))
        except (ValueError, MalformedRecord) as error:
            record, why = None, f": {error}"
        else:
            why = ""
        if not isinstance(record, TOLD):
            kinds = ", ".join(kind.kind for kind in TOLD)
            reason = f"told must be one of {kinds}, with a JSON object of at most {MAX_TOLD} bytes{why}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
            return pb.TellReply()
        self._decisions.record(record)
        # The caller may be about to kill this process. While the disk takes nothing, the record waits in memory.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._decisions.tape.flush(), TOLD_S)
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
