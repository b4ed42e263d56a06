"""The state tables of a run, its learners and its rounds: every change of state that the syncer's state machine makes.

docs/architecture.md draws them. tests/test_transitions.py fails if the code makes a change that is not listed here, or if a
listed function does not make it.
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = "[*]"
"""Before the first state and after the last one."""


@dataclass(frozen=True)
class Transition:
    source: str
    target: str
    why: str
    where: str
    """The function that makes the change: file in core/, class and name."""


RUN = (
    Transition(NONE, "gathering", "created", "state.py::RunState"),
    Transition("gathering", "running", "start_with learners are ready", "membership.py::Membership.begin"),
    Transition("gathering", "running", "a learner that trained before is back", "membership.py::Membership._go_on"),
    Transition("gathering", "closing", "close requested", "syncer.py::SyncerCore._close"),
    Transition("running", "closing", "budget spent or close requested", "syncer.py::SyncerCore._close"),
    Transition("running", "gathering", "restored from a snapshot", "membership.py::Membership.let_go_of_all"),
    Transition("closing", "ended", "every fragment had its last round", "syncer.py::SyncerCore._finish"),
    Transition("ended", NONE, "", ""),
)

LEARNER = (
    Transition(NONE, "waiting", "first Hello of a session", "membership.py::Membership._admit"),
    Transition("waiting", "training", "Begin", "membership.py::Membership.begin"),
    Transition("waiting", "training", "Hello of a session that had begun", "membership.py::Membership._admit"),
    Transition("training", "waiting", "Hello that does not resume", "membership.py::Membership._admit"),
    Transition("training", "leaving", "Leaving", "membership.py::Membership.leave_requested"),
    Transition("leaving", "waiting", "Hello that does not resume", "membership.py::Membership._admit"),
    Transition("leaving", "gone", "gave every fragment", "membership.py::Membership.dismiss_leaving"),
    Transition("waiting", "away", "stream ended", "membership.py::Membership.stream_ended"),
    Transition("training", "away", "stream ended", "membership.py::Membership.stream_ended"),
    Transition("leaving", "away", "stream ended", "membership.py::Membership.stream_ended"),
    Transition("away", "waiting", "Hello", "membership.py::Membership._admit"),
    Transition("away", "training", "Hello", "membership.py::Membership._admit"),
    Transition("away", "leaving", "Hello", "membership.py::Membership._admit"),
    Transition("away", "gone", "silent for silence_s", "membership.py::Membership.notice_silence"),
    Transition("away", "gone", "was gone before the syncer restarted", "standing.py::known_learners"),
    Transition("gone", "waiting", "Hello", "membership.py::Membership._admit"),
    Transition("gone", "training", "Hello", "membership.py::Membership._admit"),
    Transition("gone", "leaving", "Hello", "membership.py::Membership._admit"),
    Transition("waiting", "gone", "silent for silence_s", "membership.py::Membership.notice_silence"),
    Transition("waiting", "gone", "Leaving", "membership.py::Membership.leave_requested"),
    Transition("waiting", "gone", "Hello while the run closes", "membership.py::Membership.hello"),
    Transition("waiting", "gone", "the run closes", "syncer.py::SyncerCore._close"),
    Transition("training", "gone", "silent for silence_s", "membership.py::Membership.notice_silence"),
    Transition("training", "gone", "Hello after the end", "membership.py::Membership.hello"),
    Transition("training", "gone", "the run ended", "syncer.py::SyncerCore._finish"),
    Transition("leaving", "gone", "silent for silence_s", "membership.py::Membership.notice_silence"),
    Transition("leaving", "gone", "Hello after the end", "membership.py::Membership.hello"),
    Transition("leaving", "gone", "the run ended", "syncer.py::SyncerCore._finish"),
)

ROUND = (
    Transition(NONE, "gathering", "the fragment is due; learners are asked", "rounds.py::Rounds._open"),
    Transition("gathering", "grace", "quorum", "rounds.py::Rounds.settle"),
    Transition("gathering", "merging", "last chance over without a quorum", "rounds.py::Rounds.settle"),
    Transition("gathering", NONE, "cancelled: nobody can give anything", "rounds.py::Rounds._cancel"),
    Transition("gathering", NONE, "dropped: its shard is away", "rounds.py::Rounds._drop_void"),
    Transition("gathering", "restoring", "rollback", "rounds.py::Rounds.restore"),
    Transition("grace", "merging", "everyone answered, or the deadline passed", "rounds.py::Rounds.settle"),
    Transition("grace", NONE, "dropped: its shard is away", "rounds.py::Rounds._drop_void"),
    Transition("grace", "restoring", "rollback", "rounds.py::Rounds.restore"),
    Transition("merging", NONE, "stored, then announced", "rounds.py::Rounds.stored"),
    Transition("merging", "grace", "not stored; retried after a second", "rounds.py::Rounds.store_failed"),
    Transition("merging", "gathering", "not stored, and no quorum yet", "rounds.py::Rounds.store_failed"),
    Transition("merging", NONE, "dropped: its shard is away", "rounds.py::Rounds._drop_void"),
    Transition(NONE, "restoring", "rollback", "rounds.py::Rounds.restore"),
    Transition("restoring", NONE, "stored, then announced", "rounds.py::Rounds.stored"),
    Transition("restoring", NONE, "given up after ten tries", "rounds.py::Rounds.store_failed"),
)
"""A round has no field for its state: it is gathering until `quorum_at` is set, then in grace until `merging_since` is. A round
that `restores` stays in that state between tries."""
