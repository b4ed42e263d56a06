"""Which H, P, τ, K and codec fit a model, its islands and their links: arithmetic, and what experiments have shown.

With a quorum of one, rounds follow the fastest island: everybody is asked for every fragment once in H of its steps, which is
a cycle. An exchange of a fragment takes three round trips, the time of its bytes, and that of merging and storing it. While it
goes on an island trains on, and with `overwrite` what it learns of that fragment meanwhile is replaced: the share of the work
that is kept is one minus the length of an exchange over that of a cycle. So three things decide: the bytes must fit the
link, the exchange must be short beside a cycle, and the rest is a choice of what costs the model least.
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
"""A link that is used more than this has queues that grow."""
LONGEST = 1 / 8
"""An exchange should take no more than this share of a cycle."""
MERGE_PER_S = 2.5e8
"""Elements of contributions that a syncer decodes and merges, on a few cores; benchmarks/syncer.py measures it."""
STORE_PER_S, STORE_S = 8e7, 0.02
"""Elements of a version that are made durable, 12 bytes each, on an ordinary disk; and what a sync takes by itself."""
ROUND_TRIPS = 3.0
"""Ask and upload, announce and fetch, and what connections add."""
SPREADS = (24, 48, 96, 192, 384)
PAIRS = (("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("topk3", "int4"), ("topk1", "topk3"))
CODEC_COST = {"bf16": 0.0, "int8": 0.0, "int4": 0.1, "topk3": 10.0, "topk1": 15.0}
"""In per cent of validation loss, as measured over 2,000 steps of 11M parameters (results/LOG.md)."""
SPREAD_COST = {24: 0.0, 48: 1.5, 96: 3.8, 192: 6.0, 384: 9.0}
"""The same for H: up to 96 as measured with four islands at 11M parameters (results/LOG.md), guesses beyond."""
REPLACED_COST = 10.0
"""The same for work that is replaced: about what a share of lost training tokens costs small models."""


@dataclass(frozen=True)
class Island:
    name: str
    step_s: float
    up_mbit: float
    down_mbit: float
    round_trip_s: float


@dataclass(frozen=True)
class Choice:
    """One way to set things, and what it would come to for the island that fares worst."""

    every: int
    fragments: int
    overlap: int
    send: str
    publish: str
    worst: str
    load: float
    """Share of its link that is needed, the busier way."""
    mbit: float
    exchange_steps: float
    """How long an exchange takes, in steps of the fastest island."""
    kept: float
    """Share of its work that is in the model."""
    gbit: float
    """All islands together, at the syncer, the busier way."""

    @property
    def cost(self) -> float:
        codecs = CODEC_COST[self.send] + CODEC_COST[self.publish]
        return codecs + SPREAD_COST[self.every] + REPLACED_COST * (1 - self.kept)

    @property
    def strain(self) -> float:
        """More than one does not fit."""
        return max(self.load / FULL, self.exchange_steps / (LONGEST * self.every))

    @property
    def fits(self) -> bool:
        return self.strain <= 1

    @property
    def why_not(self) -> str:
        if self.load > 1:
            return f"needs {self.mbit:,.0f} Mbit/s, {self.load:.1f} times what the link of {self.worst} has"
        if self.load > FULL:
            return f"fills {100 * self.load:.0f}% of the link of {self.worst}: queues would grow"
        if not self.fits:
            took = f"an exchange with {self.worst} takes {self.exchange_steps:.1f} of {self.every} steps"
            return f"{took}: {100 * (1 - self.kept):.0f}% of its work would be replaced"
        return f"costs the model more: about {self.cost:.1f}% of the loss"


@functools.cache
def bits(name: str) -> float:
    many = 1 << 20
    return 8 * codec(name).size_bytes(many) / many


def weigh(parameters: float, islands: Sequence[Island], every: int, send: str, publish: str) -> Choice:
    """What a choice would come to."""
    fragments = max(1, min(every, 24, int(parameters * bits(send) / 8 / 65_536)))
    pace = min(island.step_s for island in islands)
    up, down = (parameters * bits(name) / (every * pace) / 1e6 for name in (send, publish))
    elements = parameters / fragments
    merge_s = len(islands) * elements / MERGE_PER_S + elements / STORE_PER_S + STORE_S
    found = []
    for island in islands:
        load = max(up / island.up_mbit, down / island.down_mbit)
        bytes_s = elements / 1e6 * (bits(send) / island.up_mbit + bits(publish) / island.down_mbit)
        # What waits in a link that is too full never stops waiting.
        steps = (ROUND_TRIPS * island.round_trip_s + merge_s + bytes_s / max(1 - load, 0.05)) / pace
        kept = max(0.0, 1 - steps / every) / max(1.0, load)
        overlap = max(1, min(math.ceil(steps), every - 1))
        gbit = len(islands) * max(up, down) / 1000
        mbit = up if up / island.up_mbit >= down / island.down_mbit else down
        found.append(Choice(every, fragments, overlap, send, publish, island.name, load, mbit, steps, kept, gbit))
    return max(found, key=lambda choice: choice.strain)


def choices(parameters: float, islands: Sequence[Island]) -> list[Choice]:
    """Everything that is worth a thought, the best first; what does not fit comes after what does."""
    found = [weigh(parameters, islands, every, *pair) for every, pair in itertools.product(SPREADS, PAIRS)]
    return sorted(found, key=lambda choice: (not choice.fits, choice.cost if choice.fits else choice.strain, choice.every))


QUORUM = 1
"""With a grace window for the others. Were it all of them, the slowest would set the pace of merging."""


def data_parallel_utilisation(parameters: float, islands: Sequence[Island]) -> float:
    """Of gradients in bf16, summed over all islands before every step, none of it hidden behind computing."""
    count = len(islands)
    if count == 1:
        return 1.0
    exchanged = 2 * (count - 1) / count * parameters * 16 / 1e6
    slowest = max(exchanged / min(i.up_mbit, i.down_mbit) + 2 * (count - 1) * i.round_trip_s / 2 for i in islands)
    step = max(island.step_s for island in islands)
    return step / (step + slowest)


def host_bytes(parameters: float, choice: Choice) -> float:
    """Of an island's host: the version held, in fp32, and what may be under way. Beside a GPU that is set aside beforehand, for
    some of the fragments at a time; elsewhere it is two fragments or so."""
    at_a_time = max(2, choice.fragments // SET_ASIDE_SHARE)
    under_way = at_a_time * parameters / choice.fragments * (4 + bits(choice.send) / 8 + bits(choice.publish) / 8)
    return 4 * parameters + under_way


def syncer_bytes(parameters: float, choice: Choice, islands: int) -> float:
    """Values and momentum; what learners have and the differences to it; contributions to two fragments."""
    return parameters * (8 + 4 + 2.25) + islands * 2 * parameters / choice.fragments * (4 + bits(choice.send) / 8)


def join_s(parameters: float, islands: Sequence[Island]) -> float:
    """To fetch the whole model in fp32, over the thinnest link."""
    return max(parameters * 32 / 1e6 / island.down_mbit for island in islands)
