"""The formal check of a contribution: known learner, open round, acceptable base version, own samples."""

from __future__ import annotations

from skerry.core.leases.ranges import Leases
from skerry.core.messages import Contributed
from skerry.core.state import RunState


def why_refused(offer: Contributed, run: RunState, min_base: int, leases: Leases) -> str | None:
    """Why the contribution is refused, or None. `min_base` is the oldest base version accepted from this learner."""
    if not 0 <= offer.fragment < len(run.fragments):
        return f"there is no fragment {offer.fragment}"
    fragment = run.fragments[offer.fragment]
    learner = run.learners.get(offer.learner)
    if learner is None or learner.phase not in ("training", "leaving"):
        return f"{offer.learner} is not in the run"
    round_ = fragment.round
    if round_ is None or round_.number != offer.round:
        return f"no round {offer.round} is open for fragment {offer.fragment}"
    if round_.merging_since is not None:
        return f"round {offer.round} of fragment {offer.fragment} is being merged already"
    if offer.learner in round_.arrived:
        return f"duplicate: {offer.learner} has answered round {offer.round} of fragment {offer.fragment}"
    if offer.learner not in round_.asked:
        return f"{offer.learner} was not asked for fragment {offer.fragment} in round {offer.round}"
    if offer.base > fragment.version:
        return f"base version {offer.base} of fragment {offer.fragment} does not exist; the newest is {fragment.version}"
    if offer.base < min_base:
        return f"stale: base version {offer.base} of fragment {offer.fragment}, the newest is {fragment.version}"
    if offer.steps < 1 or offer.tokens < 1:
        return f"steps and tokens must be >= 1, got {offer.steps} and {offer.tokens}"
    return leases.why_refused(offer.learner, learner.session, offer.samples)
