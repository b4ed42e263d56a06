"""Translates the core's actions into messages to learners."""

from __future__ import annotations

from skerry.core import messages as m
from skerry.core.syncer import SyncerCore
from skerry.wire import skerry_pb2 as pb


def messages_of(action: m.Action, run_id: str, core: SyncerCore) -> list[tuple[str, pb.ToLearner]]:
    """Learners and the messages they get for this action. Leases are excluded: they must be durable before they are sent."""
    if isinstance(action, m.Announce):
        about = {"fragment": action.fragment, "version": action.version, "round": action.round, "run_tokens": core.tokens}
        recipients = zip(action.learners, action.counted, strict=True)
        return [(learner, pb.ToLearner(announce=pb.Announce(**about, counted=counted))) for learner, counted in recipients]
    if isinstance(action, m.Ask):
        ask = pb.Ask(fragment=action.fragment, round=action.round, min_base=action.min_base, anew=action.anew)
        return [(action.learner, pb.ToLearner(ask=ask))]
    if isinstance(action, m.Welcome):
        return [(action.learner, pb.ToLearner(welcome=_welcome(action, run_id, core)))]
    if isinstance(action, m.Begin):
        return [(action.learner, pb.ToLearner(begin=pb.Begin(step=action.step)))]
    if isinstance(action, m.NoLease):
        return [(action.learner, pb.ToLearner(no_lease=pb.NoLease(reason=action.reason)))]
    if isinstance(action, m.Caution):
        caution = pb.Caution(quarantined=action.quarantined, reason=action.reason)
        return [(action.learner, pb.ToLearner(caution=caution))]
    if isinstance(action, m.StopTraining):
        return [(action.learner, progress_of(core)), (action.learner, pb.ToLearner(stop=pb.Stop()))]
    if isinstance(action, m.Goodbye):
        expected = action.reason in (m.LEFT, m.OVER)
        goodbye = pb.Goodbye(reason=action.reason, final=action.final, expected=expected)
        return [(action.learner, pb.ToLearner(goodbye=goodbye))]
    return []


def _welcome(action: m.Welcome, run_id: str, core: SyncerCore) -> pb.Welcome:
    return pb.Welcome(
        run_id=run_id,
        slot=action.slot,
        step=action.step,
        resumed=action.resumed,
        versions=action.versions,
        counted=action.counted,
        merged_rounds=action.merged_rounds,
        run_tokens=core.tokens,
        quarantined=action.quarantined,
        leased=action.leased,
    )


def progress_of(core: SyncerCore) -> pb.ToLearner:
    return pb.ToLearner(progress=pb.Progress(run_tokens=core.tokens, step=core.step))


def lease_message(lease: m.Lease) -> pb.ToLearner:
    return pb.ToLearner(lease=pb.Lease(pool=lease.pool, start=lease.start, count=lease.count, position=lease.position))
