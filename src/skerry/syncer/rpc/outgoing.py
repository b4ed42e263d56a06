"""What the syncer decided, as the messages that learners get."""

from __future__ import annotations

from skerry.core import messages as m
from skerry.core.syncer import SyncerCore
from skerry.wire import skerry_pb2 as pb


def messages_of(action: m.Action, run_id: str, core: SyncerCore) -> list[tuple[str, pb.ToLearner]]:
    """Who is told what at once. A lease is not among it: it must be durable first."""
    if isinstance(action, m.Announce):
        told = zip(action.names, action.counted, strict=True)
        return [(name, pb.ToLearner(announce=_announce(action, counted, core))) for name, counted in told]
    if isinstance(action, m.StopTraining):
        return [(action.name, progress_of(core)), (action.name, pb.ToLearner(stop=pb.Stop()))]
    message = _message(action, run_id, core)
    return [(action.name, message)] if message is not None else []  # type: ignore[union-attr]


def _message(action: m.Action, run_id: str, core: SyncerCore) -> pb.ToLearner | None:
    if isinstance(action, m.Ask):
        return pb.ToLearner(ask=_ask(action))
    if isinstance(action, m.Welcome):
        return pb.ToLearner(welcome=_welcome(action, run_id, core))
    if isinstance(action, m.Begin):
        return pb.ToLearner(begin=pb.Begin(step=action.step))
    if isinstance(action, m.NoLease):
        return pb.ToLearner(no_lease=pb.NoLease(reason=action.reason))
    if isinstance(action, m.Caution):
        return pb.ToLearner(caution=pb.Caution(quarantined=action.quarantined, reason=action.reason))
    if isinstance(action, m.Goodbye):
        expected = action.reason in (m.LEFT, m.OVER)
        return pb.ToLearner(goodbye=pb.Goodbye(reason=action.reason, final=action.final, expected=expected))
    return None


def _ask(action: m.Ask) -> pb.Ask:
    return pb.Ask(fragment=action.fragment, step=action.step, min_base=action.min_base, anew=action.anew)


def _welcome(action: m.Welcome, run_id: str, core: SyncerCore) -> pb.Welcome:
    return pb.Welcome(
        run_id=run_id,
        slot=action.slot,
        step=action.step,
        resumed=action.resumed,
        versions=action.versions,
        counted=action.counted,
        merged_steps=action.merged_steps,
        run_tokens=core.tokens,
        quarantined=action.quarantined,
        leased=action.leased,
    )


def _announce(action: m.Announce, counted: int, core: SyncerCore) -> pb.Announce:
    return pb.Announce(
        fragment=action.fragment, version=action.version, step=action.step, counted=counted, run_tokens=core.tokens
    )


def progress_of(core: SyncerCore) -> pb.ToLearner:
    return pb.ToLearner(progress=pb.Progress(run_tokens=core.tokens, step=core.step))


def lease_message(lease: m.Lease) -> pb.ToLearner:
    return pb.ToLearner(lease=pb.Lease(pool=lease.pool, start=lease.start, count=lease.count, position=lease.position))
