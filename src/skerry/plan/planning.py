"""Choose H, P, τ, K and codecs for a model, its islands and their links, from arithmetic and measured costs.

With a quorum of one, rounds follow the fastest island: every island is asked for every fragment once per cycle, H steps of the
fastest island. Exchanging a fragment takes three round trips, the transfer of its bytes, and the merge and write at the syncer.
Islands train on during the exchange. With `overwrite`, their work on that fragment in this time is replaced, so the kept share
is 1 − exchange time / cycle time. Hence three criteria: the bytes must fit the link, the exchange must be short compared with a
cycle, and among the settings that satisfy both the one with the lowest estimated loss wins.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from skerry.tensors.codecs.codec import codec
from skerry.tensors.fragments import SET_ASIDE_SHARE

FULL = 0.7
"""Maximum load of a link. Above it, queues grow."""
LONGEST = 1 / 8
"""Maximum length of an exchange, as a share of a cycle."""
MERGE_PER_S = 2.5e8
"""Contributed elements per second that a syncer decodes and merges on a few cores; benchmarks/syncer.py measures it."""
STORE_PER_S, STORE_S = 8e7, 0.02
"""Elements per second written durably on an ordinary disk, at 12 bytes each; and the fixed cost of an fsync."""
ROUND_TRIPS = 3.0
"""Ask and upload, announce and fetch, and connection overhead."""
SPREADS = (24, 48, 96, 192, 384)
PAIRS = (("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("topk3", "int4"), ("topk1", "topk3"))
CODEC_COST = {"bf16": 0.0, "int8": 0.0, "int4": 0.1, "topk3": 10.0, "topk1": 15.0}
"""Percent of validation loss, measured over 2,000 steps with 11M parameters (results/LOG.md)."""
SPREAD_COST = {24: 0.0, 48: 1.5, 96: 3.8, 192: 6.0, 384: 9.0}
"""Percent of validation loss for H: measured up to 96 with four islands and 11M parameters (results/LOG.md), guessed beyond."""
REPLACED_COST = 10.0
"""Percent of validation loss if all work were replaced: about what losing training tokens costs small models."""


@dataclass(frozen=True)
class Island:
    name: str
    step_s: float
    up_mbit: float
    down_mbit: float
    round_trip_s: float


@dataclass(frozen=True)
class Choice:
    """One combination of settings, with its estimates for the worst-off island."""

    every: int
    fragments: int
    overlap: int
    send: str
    publish: str
    worst: str
    load: float
    """Load of that island's link, in the busier direction."""
    mbit: float
    exchange_steps: float
    """Length of an exchange, in steps of the fastest island."""
    kept: float
    """Share of that island's work that reaches the model."""
    gbit: float
    """Traffic of all islands at the syncer, in the busier direction."""

    @property
    def cost(self) -> float:
        codecs = CODEC_COST[self.send] + CODEC_COST[self.publish]
        return codecs + SPREAD_COST[self.every] + REPLACED_COST * (1 - self.kept)

    @property
    def strain(self) -> float:
        """How much of the limits is used; above 1 the settings do not fit."""
        return max(self.load / FULL, self.exchange_steps / (LONGEST * self.every))

    @property
    def fits(self) -> bool:
        return self.strain <= 1

    @property
    def why_not(self) -> str:
        if self.load > 1:
            return f"needs {self.mbit:,.0f} Mbit/s, {self.load:.1f} times the link of {self.worst}"
        if self.load > FULL:
            return f"fills {100 * self.load:.0f}% of the link of {self.worst}, so queues would grow"
        if not self.fits:
            length = f"an exchange with {self.worst} takes {self.exchange_steps:.1f} of {self.every} steps"
            return f"{length}, so {100 * (1 - self.kept):.0f}% of its work would be replaced"
        return f"costs more: about {self.cost:.1f}% of the loss"


@functools.cache
def bits(name: str) -> float:
    """Encoded bits per element."""
    many = 1 << 20
    return 8 * codec(name).size_bytes(many) / many


def weigh(parameters: float, islands: Sequence[Island], every: int, send: str, publish: str) -> Choice:
    """Estimate these settings for the worst-off island."""
    fragments = max(1, min(every, 24, int(parameters * bits(send) / 8 / 65_536)))
    pace = min(island.step_s for island in islands)
    up, down = (parameters * bits(name) / (every * pace) / 1e6 for name in (send, publish))
    elements = parameters / fragments
    merge_s = len(islands) * elements / MERGE_PER_S + elements / STORE_PER_S + STORE_S
    found = []
    for island in islands:
        load = max(up / island.up_mbit, down / island.down_mbit)
        bytes_s = elements / 1e6 * (bits(send) / island.up_mbit + bits(publish) / island.down_mbit)
        # Queueing delay grows without bound as the load approaches 1.
        steps = (ROUND_TRIPS * island.round_trip_s + merge_s + bytes_s / max(1 - load, 0.05)) / pace
        kept = max(0.0, 1 - steps / every) / max(1.0, load)
        overlap = max(1, min(math.ceil(steps), every - 1))
        gbit = len(islands) * max(up, down) / 1000
        mbit = up if up / island.up_mbit >= down / island.down_mbit else down
        found.append(Choice(every, fragments, overlap, send, publish, island.name, load, mbit, steps, kept, gbit))
    return max(found, key=lambda choice: choice.strain)


def choices(parameters: float, islands: Sequence[Island]) -> list[Choice]:
    """All combinations of settings, best first; those that do not fit come last."""
    found = [weigh(parameters, islands, every, *pair) for every, pair in itertools.product(SPREADS, PAIRS)]
    return sorted(found, key=lambda choice: (not choice.fits, choice.cost if choice.fits else choice.strain, choice.every))


QUORUM = 1
"""The others get the grace window. A quorum of all islands would merge at the pace of the slowest."""


def data_parallel_utilisation(parameters: float, islands: Sequence[Island]) -> float:
    """Utilisation with a bf16 all-reduce of the gradients in every step, not overlapped with computation."""
    count = len(islands)
    if count == 1:
        return 1.0
    exchanged = 2 * (count - 1) / count * parameters * 16 / 1e6
    slowest = max(exchanged / min(i.up_mbit, i.down_mbit) + 2 * (count - 1) * i.round_trip_s / 2 for i in islands)
    step = max(island.step_s for island in islands)
    return step / (step + slowest)


def host_bytes(parameters: float, choice: Choice) -> float:
    """Host memory of an island: the current version in fp32, and fragments in flight. With a GPU, pinned buffers for
    1/SET_ASIDE_SHARE of the fragments are allocated in advance; otherwise about two fragments are in flight."""
    at_a_time = max(2, choice.fragments // SET_ASIDE_SHARE)
    in_flight = at_a_time * parameters / choice.fragments * (4 + bits(choice.send) / 8 + bits(choice.publish) / 8)
    return 4 * parameters + in_flight


def syncer_bytes(parameters: float, choice: Choice, islands: int) -> float:
    """Memory of the syncer: values and momentum, the published versions and updates, and contributions to two fragments."""
    return parameters * (8 + 4 + 2.25) + islands * 2 * parameters / choice.fragments * (4 + bits(choice.send) / 8)


def join_s(parameters: float, islands: Sequence[Island]) -> float:
    """Seconds to fetch the whole model in fp32 over the slowest link."""
    return max(parameters * 32 / 1e6 / island.down_mbit for island in islands)
