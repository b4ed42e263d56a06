"""The gRPC service: handlers for the server, callables for the client. The only place that names methods and message types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import Parcel, pack, parser, serialize, unpack

_SERVICE = "skerry.v1.Syncer"
FIRST_SEALED = 6
"""First protocol version whose messages have seals."""

T = TypeVar("T")


class SyncerService(Protocol):
    """The methods a syncer implements. Streams yield None in place of a damaged message."""

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.RunDescription: ...

    def control(self, messages: AsyncIterator[pb.ToSyncer | None], context: Any) -> AsyncIterator[pb.ToLearner]: ...

    async def bulk(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], context: Any) -> None: ...

    async def close_run(self, request: pb.CloseRequest, context: Any) -> pb.CloseReply: ...

    async def snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotReply: ...

    async def tell(self, request: pb.TellRequest, context: Any) -> pb.TellReply: ...

    def probe(self, messages: AsyncIterator[pb.ProbeUp | None], context: Any) -> AsyncIterator[pb.ProbeDown]: ...

    def shard(self, messages: AsyncIterator[pb.FromShard | None], context: Any) -> AsyncIterator[pb.ToShard]: ...


class BulkHandler(Protocol):
    """The methods a shard implements."""

    async def bulk(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], context: Any) -> None: ...


def or_none(parse: Callable[[bytes], T]) -> Callable[[bytes], T | None]:
    """A parser that returns None where `parse` raises DecodeError, which gRPC would otherwise log and hide."""

    def parse_if_possible(data: bytes) -> T | None:
        try:
            return parse(data)
        except DecodeError:
            return None

    return parse_if_possible


def parse_description(data: bytes) -> pb.RunDescription:
    """Parse a description. Accepts one without a seal from a syncer whose protocol version has none, so that the caller can
    report the version mismatch."""
    description = pb.RunDescription.FromString(data)
    if 0 < description.protocol < FIRST_SEALED and not description.HasField("seal"):
        return description
    return parser(pb.RunDescription)(data)


def add_to_server(service: SyncerService, server: grpc.aio.Server) -> None:
    """Register the handlers of a syncer."""
    handlers: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(service.describe, pb.DescribeRequest.FromString, serialize),
        "Control": grpc.stream_stream_rpc_method_handler(service.control, or_none(parser(pb.ToSyncer)), serialize),
        "Bulk": _bulk_handler(service),
        "Shard": grpc.stream_stream_rpc_method_handler(service.shard, or_none(parser(pb.FromShard)), serialize),
        "Probe": grpc.stream_stream_rpc_method_handler(
            service.probe, or_none(pb.ProbeUp.FromString), pb.ProbeDown.SerializeToString
        ),
        "Tell": grpc.unary_unary_rpc_method_handler(service.tell, pb.TellRequest.FromString, pb.TellReply.SerializeToString),
        "Snapshot": grpc.unary_unary_rpc_method_handler(
            service.snapshot, pb.SnapshotRequest.FromString, pb.SnapshotReply.SerializeToString
        ),
        "Close": grpc.unary_unary_rpc_method_handler(
            service.close_run, pb.CloseRequest.FromString, pb.CloseReply.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


def add_bulk_to_server(service: BulkHandler, server: grpc.aio.Server) -> None:
    """Register the handler of a shard."""
    handler = grpc.method_handlers_generic_handler(_SERVICE, {"Bulk": _bulk_handler(service)})
    server.add_generic_rpc_handlers((handler,))


def _bulk_handler(service: BulkHandler) -> Any:
    return grpc.stream_stream_rpc_method_handler(service.bulk, or_none(unpack(pb.BulkToSyncer)), pack)


class SyncerStub:
    """The methods that learners, shards and operators call, on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.describe = channel.unary_unary(
            f"/{_SERVICE}/Describe", pb.DescribeRequest.SerializeToString, or_none(parse_description)
        )
        self.control: Any = channel.stream_stream(f"/{_SERVICE}/Control", serialize, or_none(parser(pb.ToLearner)))
        self.bulk: Any = channel.stream_stream(f"/{_SERVICE}/Bulk", pack, or_none(unpack(pb.BulkToLearner)))
        self.shard: Any = channel.stream_stream(f"/{_SERVICE}/Shard", serialize, or_none(parser(pb.ToShard)))
        self.probe = channel.stream_stream(f"/{_SERVICE}/Probe", pb.ProbeUp.SerializeToString, pb.ProbeDown.FromString)
        self.tell = channel.unary_unary(f"/{_SERVICE}/Tell", pb.TellRequest.SerializeToString, pb.TellReply.FromString)
        self.snapshot = channel.unary_unary(
            f"/{_SERVICE}/Snapshot", pb.SnapshotRequest.SerializeToString, pb.SnapshotReply.FromString
        )
        self.close_run = channel.unary_unary(f"/{_SERVICE}/Close", pb.CloseRequest.SerializeToString, pb.CloseReply.FromString)
