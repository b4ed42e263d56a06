"""Which H, P, τ, K and codec fit a model, its islands and their links: arithmetic, and what experiments have shown.

An exchange of a fragment takes three round trips and the time of its bytes. While it goes on an island trains on, and with
`overwrite` what it learns of that fragment meanwhile is replaced: the share of the work that is kept is one minus the length of
an exchange, in steps, over H. So three things decide: the bytes must fit the link, the exchange must be short beside H, and
the rest is a choice of what costs the model least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from skerry.core.codec import codec

FULL = 0.7
"""A link that is used more than this has queues that grow."""
LONGEST = 1 / 8
"""An exchange should take no more than this share of H."""
MERGE_BYTES_PER_S = 1e9
"""Of contributions that a syncer merges; benchmarks/syncer.py measures it."""
STORE_S = 0.02
"""To make a version durable."""
ROUND_TRIPS = 3.0
"""Ask and upload, announce and fetch, and what connections add."""
SPREADS = (24, 48, 96, 192, 384)
PAIRS = (("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("topk3", "int4"), ("topk1", "topk3"))
CODEC_COST = {"bf16": 0.0, "int8": 0.0, "int4": 0.1, "topk3": 1.0, "topk1": 2.0}
"""In per cent of validation loss: int4 as published for this kind of training; those of top-k are guesses until measured."""
SPREAD_COST = {24: 0.0, 48: 1.0, 96: 2.6, 192: 5.0, 384: 8.0}
"""The same for H: measured to 96 at 11M parameters with four islands, continued beyond."""
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
    """One way to set things, and what it would come to on the island that fares worst."""

    every: int
    fragments: int
    overlap: int
    send: str
    publish: str
    load: float
    """Share of the busiest link that it needs."""
    exchange_steps: float
    kept: float
    """Share of the work that is in the model, on the island whose exchanges take longest."""
    gbit: float
    """All islands together, at the syncer, each way."""
    island_mbit: float
    """Of the island that needs most, the busier way."""
    worst: str

    @property
    def cost(self) -> float:
        codecs = CODEC_COST[self.send] + CODEC_COST[self.publish]
        return codecs + SPREAD_COST[self.every] + REPLACED_COST * (1 - self.kept)

    @property
    def fits(self) -> bool:
        return self.load <= FULL and self.exchange_steps <= LONGEST * self.every

    @property
    def why_not(self) -> str:
        if self.load > 1:
            return f"needs {self.island_mbit:,.0f} Mbit/s, {self.load:.1f} times what the link of {self.worst} has"
        if self.load > FULL:
            return f"fills {100 * self.load:.0f}% of the link of {self.worst}: queues would grow"
        if self.exchange_steps > LONGEST * self.every:
            lost = 100 * (1 - self.kept)
            return (
                f"an exchange takes {self.exchange_steps:.1f} steps of {self.worst}: {lost:.0f}% of its work would be replaced"
            )
        return f"costs the model more: about {self.cost:.1f}% of the loss"


def bits(name: str) -> float:
    many = 1 << 20
    return 8 * codec(name).size_bytes(many) / many


def weigh(parameters: float, islands: Sequence[Island], every: int, send: str, publish: str) -> Choice:
    """What a choice would come to."""
    fragments = max(1, min(every, 24, int(parameters * bits(send) / 8 / 65_536)))
    worst_load, worst_steps, worst_mbit, who = 0.0, 0.0, 0.0, islands[0].name
    total = {"up": 0.0, "down": 0.0}
    for island in islands:
        up, down = (parameters * bits(name) / every / island.step_s / 1e6 for name in (send, publish))
        total["up"] += up
        total["down"] += down
        load = max(up / island.up_mbit, down / island.down_mbit)
        bytes_s = parameters / fragments / 1e6 * (bits(send) / island.up_mbit + bits(publish) / island.down_mbit)
        merge_s = len(islands) * parameters / fragments * bits(send) / 8 / MERGE_BYTES_PER_S + STORE_S
        # What waits in a link that is too full never stops waiting.
        exchange_s = ROUND_TRIPS * island.round_trip_s + merge_s + (bytes_s / max(1 - load, 0.05))
        steps = exchange_s / island.step_s
        if (load > FULL, steps, load) > (worst_load > FULL, worst_steps, worst_load):
            who = island.name
        worst_load, worst_steps = max(worst_load, load), max(worst_steps, steps)
        worst_mbit = max(worst_mbit, up, down)
    kept = max(0.0, 1 - worst_steps / every) / max(1.0, worst_load)
    overlap = max(1, min(math.ceil(worst_steps), every - 1))
    gbit = max(total.values()) / 1000
    return Choice(every, fragments, overlap, send, publish, worst_load, worst_steps, kept, gbit, worst_mbit, who)


def choices(parameters: float, islands: Sequence[Island]) -> list[Choice]:
    """Everything that is worth a thought, the best first; what does not fit comes after what does."""
    found = [weigh(parameters, islands, every, *pair) for every, pair in itertools.product(SPREADS, PAIRS)]
    return sorted(found, key=lambda choice: (not choice.fits, choice.cost if choice.fits else choice.load, choice.every))


def quorum(islands: Sequence[Island]) -> int:
    """One, with a grace window for the others. Were it all of them, the slowest would set the pace of merging."""
    return 1


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
    """Of an island's memory, for the exchange: the version held, in fp32, and what may be under way of two fragments."""
    under_way = 2 * parameters / choice.fragments * (4 + bits(choice.send) / 8 + bits(choice.publish) / 8)
    return 4 * parameters + under_way
