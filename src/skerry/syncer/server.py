"""The syncer process: gRPC in front, the state machine in the middle, merging and the store in threads behind.

Everything that touches the core runs on the event loop. A few threads compute merges and write their files; one commits them
to the tape, all that are ready in one transaction. Control messages wait in a bounded queue for each learner; one that does not
drain it is cut off rather than held for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
from torch import Tensor

from skerry.clock import Clock, SystemClock
from skerry.config import to_json
from skerry.core import codec as codecs
from skerry.core import messages as m
from skerry.core.fragment import TensorSpec, check_same_model
from skerry.core.merge import FragmentState, merge
from skerry.core.syncer import SyncerCore
from skerry.errors import JoinRefused, SkerryError, StoreError, WireError
from skerry.metrics import MetricsWriter
from skerry.syncer.store import RunStore, TapeEntry, Written
from skerry.wire import skerry_pb2 as pb
from skerry.wire.chunks import Assembly, cut
from skerry.wire.connection import PROTOCOL, SERVER_OPTIONS, TLS, bind
from skerry.wire.service import add_to_server

CONTROL_QUEUE = 4096
PROGRESS_EVERY_S = 0.25
METRICS_EVERY_S = 1.0
LINGER_S = (0.5, 10.0)
"""How long an ended run is still served: if everyone has heard of the end, and if somebody may come back."""
HELLO_S = 30.0
MAX_NAME = 200
MERGERS = 4
"""Merges computed and written at a time: writing waits for the disk more than it computes."""
MAX_COUNT = 1 << 53
MAX_STEPS_AT_ONCE = 1_000_000
"""A learner cannot have taken more steps than this between two reports."""
MAX_PROGRESS = 1e12
"""No element of a sane contribution is larger; sums and outer steps of such values stay finite in fp32."""


@dataclass
class Connection:
    """A learner's control stream, as seen from here."""

    session: str
    outbox: asyncio.Queue[pb.ToLearner | None] = field(default_factory=lambda: asyncio.Queue(CONTROL_QUEUE))
    loss: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0

    def send(self, message: pb.ToLearner) -> None:
        try:
            self.outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """Close the stream once what is queued has been sent; at once if the queue is full."""
        if self.outbox.full():
            while not self.outbox.empty():
                self.outbox.get_nowait()
        self.outbox.put_nowait(None)


@dataclass(frozen=True)
class Published:
    """A version as every learner downloads it: encoded once."""

    version: int
    codec: str
    data: memoryview
    checksum: int


class SyncerServer:
    def __init__(self, store: RunStore, *, clock: Clock | None = None) -> None:
        self.store = store
        self.layout = store.identity.layout
        self.sync = store.identity.sync
        self.clock = clock or SystemClock()
        self.states, progress, standing = store.load()
        self.core = SyncerCore(
            self.sync, len(self.layout.fragments), now=self.clock.now(), progress=progress, standing=standing
        )
        self.ended = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A defect of ours: the process must not go on as if nothing had happened."""
        self._published = [self._encode(p.version, s) for p, s in zip(progress, self.states, strict=True)]
        fixed = memoryview(store.fixed_bytes())
        self._published.append(Published(0, "safetensors", fixed, codecs.checksum(fixed)))
        self._connections: dict[str, Connection] = {}
        self._dismissed: set[str] = set()
        self._uploading: set[tuple[str, int]] = set()
        self._handlers: set[asyncio.Future[None]] = set()
        self._deltas: dict[tuple[int, str], Tensor] = {}
        self._entries: list[TapeEntry] = []
        self._mergers = ThreadPoolExecutor(MERGERS, thread_name_prefix="skerry-merge")
        self._tape = ThreadPoolExecutor(1, thread_name_prefix="skerry-tape")
        self._ready: list[tuple[Written, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None
        self._merging: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._metrics = MetricsWriter(store.folder / "metrics.jsonl")
        self._started = self.clock.now()
        self._rates: dict[str, tuple[float, int]] = {}
        self._record("syncer_started", {"step": self.core.step, "phase": self.core.phase})
        if self.core.phase == "ended":
            self.ended.set()

    def _encode(self, version: int, state: FragmentState) -> Published:
        data = codecs.codec(self.sync.publish).encode(state.values)
        return Published(version, self.sync.publish, data, codecs.checksum(data))

    # ------------------------------------------------------------ the state machine and its actions

    def dispatch(self, event: m.Event) -> None:
        try:
            for action in self.core.handle(event, self.clock.now()):
                self._perform(action)
        except Exception as error:
            # Whoever called may not notice, but a state half changed must not go on.
            if not self.failed.done():
                self.failed.set_exception(error)
            raise

    def _perform(self, action: m.Action) -> None:
        if isinstance(action, m.Record):
            self._record(action.kind, action.data)
        elif isinstance(action, m.Welcome):
            self._dismissed.discard(action.name)
            welcome = pb.Welcome(
                run_id=self.store.identity.run_id,
                slot=action.slot,
                step=action.step,
                resumed=action.resumed,
                versions=action.versions,
                counted=action.counted,
                merged_steps=action.merged_steps,
                run_tokens=self.core.tokens,
            )
            self._send(action.name, pb.ToLearner(welcome=welcome))
        elif isinstance(action, m.Begin):
            self._send(action.name, pb.ToLearner(begin=pb.Begin(step=action.step)))
        elif isinstance(action, m.Ask):
            ask = pb.Ask(fragment=action.fragment, step=action.step, min_base=action.min_base)
            self._send(action.name, pb.ToLearner(ask=ask))
        elif isinstance(action, m.Announce):
            for name, counted in zip(action.names, action.counted, strict=True):
                announce = pb.Announce(
                    fragment=action.fragment,
                    version=action.version,
                    step=action.step,
                    counted=counted,
                )
                self._send(name, pb.ToLearner(announce=announce))
        elif isinstance(action, m.Merge):
            task = asyncio.get_running_loop().create_task(self._merge(action))
            self._merging.add(task)
            task.add_done_callback(self._merge_done)
        elif isinstance(action, m.StopTraining):
            self._send(action.name, self._progress())
            self._send(action.name, pb.ToLearner(stop=pb.Stop()))
        elif isinstance(action, m.Goodbye):
            expected = action.reason in (m.LEFT, m.OVER)
            goodbye = pb.Goodbye(reason=action.reason, final=action.final, expected=expected)
            self._send(action.name, pb.ToLearner(goodbye=goodbye))
            if action.final:
                self._dismissed.add(action.name)
            connection = self._connections.pop(action.name, None)
            if connection is not None:
                connection.end()
        elif isinstance(action, m.WakeAt):
            self._wake_at(action.at)
        else:
            assert isinstance(action, m.Ended)
            self.ended.set()

    @property
    def missed_the_end(self) -> bool:
        """Is there a learner that was given up and has not been told that it need not come back?"""
        return any(learner.began and name not in self._dismissed for name, learner in self.core.learners.items())

    def _send(self, name: str, message: pb.ToLearner) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            connection.send(message)

    def _progress(self) -> pb.ToLearner:
        return pb.ToLearner(progress=pb.Progress(run_tokens=self.core.tokens, step=self.core.step))

    def _record(self, kind: str, data: dict[str, Any]) -> None:
        self._entries.append(TapeEntry(time.time(), kind, data))
        if kind in ("joined", "disconnected", "lost", "left", "began", "closing", "syncer_started", "merge_failed"):
            detail = ", ".join(f"{key} {value}" for key, value in data.items() if key not in ("learner", "session"))
            self._note("event", what=kind.replace("_", " "), island=data.get("learner"), detail=detail)

    def _note(self, kind: str, **fields: object) -> None:
        """For people to look at. A disk that cannot take it must not stop the run."""
        with contextlib.suppress(StoreError):
            self._metrics.write(kind, **fields)

    def _wake_at(self, at: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, at - self.clock.now())
        self._wake = asyncio.get_running_loop().call_later(delay, self.dispatch, m.Tick())

    def _merge_done(self, task: asyncio.Task[None]) -> None:
        self._merging.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception())  # type: ignore[arg-type]

    async def _merge(self, order: m.Merge) -> None:
        deltas = [self._deltas[order.fragment, share.name] for share in order.shares]
        started = self.clock.now()
        try:
            state, published, written = await self._in(self._mergers, self._compute, order, deltas)
            await self._commit(written)
        except SkerryError as error:
            self.dispatch(m.StoreFailed(order.fragment, str(error)))
            return
        self.states[order.fragment] = state
        self._published[order.fragment] = published
        for share in order.shares:
            self._deltas.pop((order.fragment, share.name), None)
        self.dispatch(m.Stored(order.fragment, order.version))
        total = sum(share.weight for share in order.shares)
        self._note(
            "merge",
            fragment=order.fragment,
            version=order.version,
            step=order.step,
            contributors={share.name: round(share.weight / total, 4) for share in order.shares},
            asked=order.asked,
            seconds=round(self.clock.now() - started, 6),
        )

    def _compute(self, order: m.Merge, deltas: list[Tensor]) -> tuple[FragmentState, Published, Written]:
        """One merge, off the event loop. A fragment has one merge at a time, so its state stands still meanwhile."""
        state = merge(
            self.layout,
            self.layout.fragments[order.fragment],
            self.states[order.fragment],
            deltas,
            [share.weight for share in order.shares],
            radial=self.sync.merge == "radial",
            lr=order.outer_lr,
            momentum=order.outer_momentum,
            presence=order.presence,
        )
        return state, self._encode(order.version, state), self.store.write(order, state)

    async def _commit(self, written: Written) -> None:
        """Merges that become ready while the tape is busy are committed together, in one transaction."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.append((written, done))
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit_all())
        await done

    async def _commit_all(self) -> None:
        while self._ready:
            batch, self._ready = self._ready, []
            for written, _ in batch:
                shares = [asdict(share) for share in written.order.shares]
                self._record("merged", {**asdict(written.order), "shares": shares})
            entries, self._entries = self._entries, []
            try:
                await self._in(self._tape, self.store.commit, [w for w, _ in batch], self.core.standing(), entries)
            except Exception as error:
                # These merges did not happen; everything else waits for the next write.
                self._entries = [entry for entry in entries if entry.kind != "merged"] + self._entries
                for _, done in batch:
                    done.set_exception(error)
            else:
                for _, done in batch:
                    done.set_result(None)
        self._committing = None

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    # ------------------------------------------------------------ the service

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.RunDescription:
        identity = self.store.identity
        return pb.RunDescription(
            protocol=PROTOCOL, run_id=identity.run_id, sync_json=to_json(self.sync), job_json=identity.job_json
        )

    async def close_run(self, request: pb.CloseRequest, context: Any) -> pb.CloseReply:
        if request.run_id != self.store.identity.run_id:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this syncer serves another run")
        self.dispatch(m.CloseRequested())
        return pb.CloseReply()

    async def control(self, messages: AsyncIterator[pb.ToSyncer], context: Any) -> AsyncIterator[pb.ToLearner]:
        first = await _first(messages)
        try:
            hello = self._check_hello(first)
            connection = self._admit(hello)
        except JoinRefused as refusal:
            name = first.hello.name[:MAX_NAME] if first is not None else ""
            self._record("refused", {"learner": name, "reason": str(refusal)})
            yield pb.ToLearner(refusal=pb.Refusal(reason=str(refusal)))
            return
        reader = asyncio.get_running_loop().create_task(self._read(hello.name, connection, messages))
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handlers.add(over)
        try:
            while (message := await connection.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            if self._connections.get(hello.name) is connection:
                del self._connections[hello.name]
                self.dispatch(m.Disconnected(hello.name, hello.session))
            self._handlers.discard(over)
            if not over.done():
                over.set_result(None)

    def _check_hello(self, first: pb.ToSyncer | None) -> pb.Hello:
        if first is None or first.WhichOneof("message") != "hello":
            raise JoinRefused("the first message must be a hello")
        hello = first.hello
        if hello.protocol != PROTOCOL:
            raise JoinRefused(f"protocol mismatch: the syncer speaks version {PROTOCOL}, this learner {hello.protocol}")
        if not 0 < len(hello.name) <= MAX_NAME or not 0 < len(hello.session) <= MAX_NAME:
            raise JoinRefused(f"a learner needs a name and a session of 1 to {MAX_NAME} characters")
        if max(hello.step, hello.tokens) > MAX_COUNT:
            raise JoinRefused(f"step and tokens must be at most {MAX_COUNT}")
        if hello.run_id and hello.run_id != self.store.identity.run_id:
            raise JoinRefused(f"this syncer serves run {self.store.identity.run_id}, the learner belongs to {hello.run_id}")
        specs = [TensorSpec(t.name, tuple(t.shape), t.dtype, t.rule) for t in hello.tensors]  # type: ignore[arg-type]
        check_same_model(self.layout.tensors, specs)
        return hello

    def _admit(self, hello: pb.Hello) -> Connection:
        connection = Connection(hello.session)
        old = self._connections.get(hello.name)
        if old is not None and old.session == hello.session:
            old.end()
        joined = m.Joined(hello.name, hello.session, hello.step, hello.tokens, tuple(hello.held))
        actions = self.core.handle(joined, self.clock.now())
        for action in actions:
            if isinstance(action, m.Welcome):
                self._connections[hello.name] = connection
            self._perform(action)
        if not any(isinstance(action, m.Welcome) for action in actions):
            raise JoinRefused(f"another process has taken the place of {hello.name}")
        return connection

    async def _read(self, name: str, connection: Connection, messages: AsyncIterator[pb.ToSyncer]) -> None:
        try:
            async for message in messages:
                if self._connections.get(name) is not connection:
                    return
                kind = message.WhichOneof("message")
                if kind == "report":
                    report = message.report
                    learner = self.core.learners[name]
                    if not _plausible(report, learner.step):
                        self._record("refused", {"learner": name, "reason": "a report with impossible numbers"})
                        continue
                    connection.loss = report.loss if report.HasField("loss") else connection.loss
                    connection.sent_bytes, connection.received_bytes = report.sent_bytes, report.received_bytes
                    self.dispatch(m.Reported(name, report.step, report.tokens, report.step_time_s))
                elif kind == "ready":
                    self.dispatch(m.Ready(name))
                elif kind == "nothing":
                    self.dispatch(m.NothingToGive(name, message.nothing.fragment, message.nothing.step))
                elif kind == "leaving":
                    self.dispatch(m.Leaving(name))
                else:
                    self._record("refused", {"learner": name, "reason": f"unexpected {kind or 'empty'} message"})
        finally:
            # Whatever ended the reading, the stream is of no more use.
            if self._connections.get(name) is connection:
                connection.end()

    async def upload(self, parts: AsyncIterator[pb.UploadPart], context: Any) -> pb.UploadReply:
        header: pb.UploadHeader | None = None
        damaged = False
        underway: tuple[str, int] | None = None
        try:
            assembly: Assembly | None = None
            async for part in parts:
                if part.HasField("header"):
                    if header is not None:
                        raise WireError("a second header in one upload")
                    header = part.header
                    self._check_upload(header)
                    if (header.name, header.fragment) in self._uploading:
                        damaged = True
                        raise WireError(f"another upload of fragment {header.fragment} is under way; try again later")
                    underway = (header.name, header.fragment)
                    self._uploading.add(underway)
                    assembly = Assembly(header.size_bytes, header.checksum)
                if header is None or assembly is None:
                    raise WireError("an upload must start with its header")
                assembly.add(part.chunk)
                self.core.bytes_moved(header.name, self.clock.now())
            if header is None or assembly is None:
                raise WireError("an empty upload")
            damaged = True
            data = assembly.finish()
            damaged = False
            numel = self.layout.fragments[header.fragment].numel
            delta = await asyncio.get_running_loop().run_in_executor(None, self._decode, data, numel)
            # Much may have happened while the bytes were on their way.
            offer = self._check_upload(header)
            if delta is None:
                # Nobody need wait for an answer that cannot be used.
                self.dispatch(m.NothingToGive(offer.name, offer.fragment, offer.step))
                raise WireError("the contribution is not finite, or beyond any plausible size")
        except WireError as error:
            who = {"learner": header.name[:MAX_NAME], "fragment": header.fragment, "step": header.step} if header else {}
            self._record("refused", {**who, "reason": str(error)})
            return pb.UploadReply(accepted=False, reason=str(error), damaged=damaged)
        finally:
            if underway is not None:
                self._uploading.discard(underway)
        self._deltas[offer.fragment, offer.name] = delta
        self.dispatch(offer)
        return pb.UploadReply(accepted=True)

    def _check_upload(self, header: pb.UploadHeader) -> m.Contributed:
        connection = self._connections.get(header.name)
        if connection is None or connection.session != header.session:
            raise WireError(f"{header.name!r} is not connected with this session")
        if max(header.step, header.base, header.steps, header.tokens, header.upto) > MAX_COUNT:
            raise WireError(f"counts must be at most {MAX_COUNT}")
        offer = m.Contributed(header.name, header.fragment, header.step, header.base, header.steps, header.tokens, header.upto)
        reason = self.core.why_refused(offer)
        if reason is not None:
            raise WireError(reason)
        if header.codec != self.sync.send:
            raise WireError(f"this run's contributions are {self.sync.send}, got {header.codec!r}")
        size = codecs.codec(self.sync.send).size_bytes(self.layout.fragments[header.fragment].numel)
        if header.size_bytes != size:
            raise WireError(f"fragment {header.fragment} is {size} bytes in {self.sync.send}, {header.size_bytes} declared")
        return offer

    def _decode(self, data: memoryview, numel: int) -> Tensor | None:
        """The contribution, or None if no merge could digest it."""
        delta = codecs.codec(self.sync.send).decode(data, numel)
        # NaN compares false, so it is caught too.
        return delta if numel == 0 or float(delta.abs().max()) <= MAX_PROGRESS else None

    async def download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadPart]:
        connection = self._connections.get(request.name)
        if connection is None or connection.session != request.session:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{request.name!r} is not connected")
        if request.fragment >= len(self._published):
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"there is no fragment {request.fragment}")
        published = self._published[request.fragment]
        if published.version != request.version:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"fragment {request.fragment} is at version {published.version}, not {request.version}",
            )
        header = pb.DownloadHeader(codec=published.codec, size_bytes=len(published.data), checksum=published.checksum)
        for number, chunk in enumerate(cut(published.data)):
            yield pb.DownloadPart(header=header if number == 0 else None, chunk=chunk)
            self.core.bytes_moved(request.name, self.clock.now())

    # ------------------------------------------------------------ running

    async def serve(self, address: str, tls: TLS | None = None) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=SERVER_OPTIONS, compression=grpc.Compression.NoCompression)
        add_to_server(self, server)
        port = bind(server, address, tls)
        await server.start()
        return server, port

    async def pulse(self) -> None:
        """Tell learners how far the run is, write metrics and flush the tape, until cancelled."""
        metrics_at = 0.0
        while True:
            progress = self._progress()
            for connection in list(self._connections.values()):
                if connection.outbox.qsize() < CONTROL_QUEUE // 2:
                    connection.send(progress)
            if self.clock.now() >= metrics_at:
                metrics_at = self.clock.now() + METRICS_EVERY_S
                self._write_metrics()
                await self._flush()
            await asyncio.sleep(PROGRESS_EVERY_S)

    async def _flush(self) -> None:
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        try:
            await self._in(self._tape, self.store.commit, [], self.core.standing(), entries)
        except SkerryError:
            self._entries = entries + self._entries

    async def hang_up(self) -> None:
        """End every control stream and wait until its handler has seen to it."""
        for connection in list(self._connections.values()):
            connection.end()
        deadline = self.clock.now() + 5.0
        while self._handlers and self.clock.now() < deadline:
            await asyncio.wait(self._handlers, timeout=0.5)

    async def close(self) -> None:
        """Let merges in flight finish, write the last of the tape, and let go of the run folder."""
        if self._wake is not None:
            self._wake.cancel()
        while self._merging:
            await asyncio.gather(*self._merging, return_exceptions=True)
        if self._committing is not None:
            await self._committing
        self._write_metrics()
        for _ in range(3):
            await self._flush()
        self._mergers.shutdown()
        self._tape.shutdown()
        self._metrics.close()
        self.store.close()
        if self._entries:
            raise StoreError(f"the last {len(self._entries)} decisions could not be written to the tape")

    def _write_metrics(self) -> None:
        core, now = self.core, self.clock.now()
        live = [learner for learner in core.learners.values() if learner.phase in ("training", "leaving")]
        self._note(
            "run",
            phase=core.phase,
            step=core.step,
            tokens=core.tokens,
            budget_tokens=self.sync.budget_tokens,
            merges=sum(fragment.version for fragment in core.fragments),
            participation=sum(core.participation) / len(core.participation) if core.participation else None,
            live=len(live),
            expected=self.sync.start_with,
        )
        for learner in core.learners.values():
            connection = self._connections.get(learner.name)
            then, tokens = self._rates.get(learner.name, (self._started, 0))
            rate = max(0, learner.tokens - tokens) / (now - then) if now > then else 0.0
            self._rates[learner.name] = (now, learner.tokens)
            self._note(
                "island",
                island=learner.name,
                state={"leaving": "training", "gone": "left"}.get(learner.phase, learner.phase),
                step=learner.step,
                tokens=learner.tokens,
                tokens_per_s=round(rate, 1),
                loss=connection.loss if connection else None,
                weight=round(learner.last_share, 4),
                merges=learner.merges,
                sent_bytes=connection.sent_bytes if connection else None,
                received_bytes=connection.received_bytes if connection else None,
            )


async def _first(messages: AsyncIterator[pb.ToSyncer]) -> pb.ToSyncer | None:
    async def wait() -> pb.ToSyncer | None:
        async for message in messages:
            return message
        return None

    try:
        return await asyncio.wait_for(wait(), HELLO_S)
    except asyncio.TimeoutError:
        return None


def _plausible(report: pb.Report, step_before: int) -> bool:
    sane_time = math.isfinite(report.step_time_s) and 0 <= report.step_time_s < 1e6
    return sane_time and report.tokens <= MAX_COUNT and report.step <= step_before + MAX_STEPS_AT_ONCE


async def run_syncer(
    store: RunStore,
    address: str,
    tls: TLS | None,
    *,
    on_listening: Callable[[int], None],
    stop: asyncio.Event | None = None,
) -> bool:
    """Serve until the run has ended (True) or `stop` is set (False)."""
    try:
        syncer = SyncerServer(store)
    except BaseException:
        store.close()
        raise
    try:
        server, port = await syncer.serve(address, tls)
    except BaseException:
        await syncer.close()
        raise
    on_listening(port)
    syncer.dispatch(m.Tick())  # a run restored while it closes may have nobody left to wait for
    pulse = asyncio.create_task(syncer.pulse())
    ended = asyncio.create_task(syncer.ended.wait())
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    waits: set[asyncio.Future[Any]] = {pulse, ended, stopped, syncer.failed}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for broken in done & {pulse, syncer.failed}:
            broken.result()
        if syncer.ended.is_set():
            await asyncio.sleep(LINGER_S[syncer.missed_the_end])
    finally:
        for task in (pulse, ended, stopped):
            task.cancel()
        await asyncio.gather(pulse, ended, stopped, return_exceptions=True)
        await syncer.hang_up()
        await server.stop(grace=1.0)
        await syncer.close()
    return syncer.ended.is_set()
