"""A mixture of experts in place of a layer's MLP: the router sends every token through its `active` best experts.

All shapes depend only on the number of tokens, and nothing is read back from the device, so the layer can be compiled and
captured in a CUDA graph.

Tokens are gathered into a table of experts × capacity slots, all experts process their slots in one batched product, and each
token sums the outputs of its slots. In training an expert serves at most CAPACITY times its even share and drops further
tokens. The table is filled in token order, so later tokens are dropped first: within a sequence no token depends on a later
one, but it may depend on earlier sequences in the batch. In evaluation every expert has room for every token, so nothing is
dropped and a token's output depends on no other token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skerry.models.layers import Linear

CAPACITY = 1.25
"""Slots per expert in training, as a multiple of its even share of the tokens."""
BALANCE = 0.01
"""Weight of `balance_loss` in each layer."""
ROUTER_SIZE = 1e-3
"""Weight of the router's z-loss (the squared logsumexp of its logits), which keeps the logits from growing."""
_ROW_MULTIPLE = 8
"""Rows of a batched product are a multiple of this, because GPUs are slower with others."""
_WIDTH_MULTIPLE = 16


def expert_width(dense: int, active: int) -> int:
    """Hidden width of one expert, so that `active` of them have as many parameters as an MLP of width `dense`. Rounded to
    keep matrices aligned."""
    return max(round(dense / active / _WIDTH_MULTIPLE), 1) * _WIDTH_MULTIPLE


def training_capacity(tokens: int, experts: int, active: int) -> int:
    """Slots per expert. At most one per token is needed, because a token's experts are distinct."""
    slots = math.ceil(CAPACITY * tokens * active / experts)
    return min(-(-slots // _ROW_MULTIPLE) * _ROW_MULTIPLE, tokens)


class Routing(NamedTuple):
    """The mapping between tokens and slots. An assignment is one of the `active` experts of one token."""

    assignment_of_slot: Tensor
    """(experts × capacity). Empty slots hold an arbitrary assignment; their output is never read."""
    filled: Tensor
    """(experts × capacity): whether the slot is in use."""
    slot_of: Tensor
    """(tokens, active). Slot 0 for dropped assignments."""
    kept: Tensor
    """(tokens, active): whether the assignment has a slot."""
    wanted: Tensor
    """(experts): assignments per expert, including dropped ones."""


def routes_of(chosen: Tensor, experts: int, capacity: int) -> Routing:
    """Assign slots to tokens. `chosen` (tokens, active) holds the experts of each token."""
    device, assignments = chosen.device, chosen.flatten()
    count, slots = assignments.numel(), experts * capacity
    # Rank of each assignment within its expert. The long dimension is last, because scans along others are slow.
    ranks = (assignments == torch.arange(experts, device=device)[:, None]).cumsum(dim=1, dtype=torch.int32)
    wanted = ranks[:, -1]
    rank = ranks.gather(0, assignments[None])[0] - 1
    kept = rank < capacity
    slot = assignments * capacity + rank
    # An additional slot takes the dropped assignments. Empty slots hold different assignments, not all the same one.
    table = torch.arange(slots + 1, device=device) % count
    table = table.scatter(0, torch.where(kept, slot, slots), torch.arange(count, device=device))[:slots]
    filled = (torch.arange(capacity, device=device) < wanted[:, None]).flatten()
    return Routing(table, filled, torch.where(kept, slot, 0).view_as(chosen), kept.view_as(chosen), wanted)


# With a table for each direction, gradients are gathered too. Autograd would scatter them, and on a GPU sum them in an order
# that differs from run to run.


class _IntoSlots(torch.autograd.Function):
    """(tokens, width) → (slots, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot_of: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of, kept)
        return x.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        slot_of, kept = ctx.saved_tensors
        rows = gradient.index_select(0, slot_of.flatten()).view(*slot_of.shape, -1)
        return (rows * kept[..., None]).sum(dim=1), None, None, None


class _OutOfSlots(torch.autograd.Function):
    """(slots, width) → (tokens, width): the weighted sum over each token's slots. Dropped assignments must have weight 0."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, slot_of: Tensor, assignment_of_slot: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, slot_of, assignment_of_slot, filled)
        rows = y.index_select(0, slot_of.flatten()).view(*slot_of.shape, -1)
        return (rows * weights[..., None]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, slot_of, assignment_of_slot, filled = ctx.saved_tensors
        active = slot_of.shape[1]
        rows = y.index_select(0, slot_of.flatten()).view(*slot_of.shape, -1)
        to_weights = (rows * gradient[:, None]).sum(dim=-1)
        weight_of_slot = weights.flatten().index_select(0, assignment_of_slot) * filled
        to_slots = gradient.index_select(0, assignment_of_slot // active) * weight_of_slot[:, None]
        return to_slots.to(y.dtype), to_weights, None, None, None


def _into_slots(x: Tensor, routes: Routing) -> Tensor:
    token_of_slot = routes.assignment_of_slot // routes.slot_of.shape[1]
    return cast(Tensor, _IntoSlots.apply(x, token_of_slot, routes.slot_of, routes.kept))  # type: ignore[no-untyped-call]


def _out_of_slots(y: Tensor, weights: Tensor, routes: Routing) -> Tensor:
    tables = (routes.slot_of, routes.assignment_of_slot, routes.filled)
    return cast(Tensor, _OutOfSlots.apply(y, weights * routes.kept, *tables))  # type: ignore[no-untyped-call]


def balance_loss(chances: Tensor, wanted: Tensor) -> Tensor:
    """Experts × Σ (share of assignments × mean probability) over experts: 1 if all are used evenly, more otherwise.

    `chances` (tokens, experts) are the router's probabilities. Only they have a gradient, which grows with an expert's use.
    """
    experts = chances.shape[1]
    shares = wanted / wanted.sum()
    return experts * (shares * chances.mean(dim=0)).sum()


class Expert(nn.Module):
    """The two matrices of one expert. Separate parameters, so that optimizers and merging treat them like any other."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int, dense: int, experts: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.router = Linear(width, experts)
        hidden = expert_width(dense, active)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The experts' output in the shape of x and, in training, the auxiliary loss that balances the experts.

        Every island balances the experts over its own tokens.
        """
        flat = x.flatten(0, -2)
        tokens, experts = flat.shape[0], len(self.experts)
        # Never in bf16, where rounding would decide between close experts. On a GPU it is TF32 if the job allows that.
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(flat.to(exact), self.router.weight.to(exact))
        chances = logits.softmax(dim=-1)
        weights, chosen = chances.topk(self.active, dim=-1)
        if self.active > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # With a single expert the normalized weight would always be 1 and give the router no gradient, so keep the probability.
        capacity = training_capacity(tokens, experts, self.active) if self.training else tokens
        routes = routes_of(chosen, experts, capacity)
        into = _into_slots(flat, routes)
        done = self._work(into.view(experts, capacity, -1)).flatten(0, 1)
        out = _out_of_slots(done, weights, routes).to(x.dtype).view_as(x)
        if not self.training:
            return out, None
        router_size = logits.logsumexp(dim=-1).square().mean()
        return out, BALANCE * balance_loss(chances, routes.wanted) + ROUTER_SIZE * router_size

    def _work(self, into: Tensor) -> Tensor:
        """Run each expert on its slots: (experts, capacity, width)."""
        experts = cast("list[Expert]", self.experts)
        up = torch.stack([expert.up.weight for expert in experts])
        down = torch.stack([expert.down.weight for expert in experts])
        hidden = F.relu(torch.bmm(into, up.transpose(1, 2)))
        return torch.bmm(hidden * hidden, down.transpose(1, 2))
