"""A mixture of experts in place of a layer's MLP: every token goes through the `active` experts its router likes best.

Owns routing, the experts' matrices and the losses that keep experts evenly used. All shapes follow from the number of tokens
alone and nothing is read back from the device, so the layer can be compiled and captured in a CUDA graph.

Tokens are gathered into a table of experts × capacity slots, all experts work on their slots in one batched product, and each
token sums up what comes out of its slots. In training an expert serves at most CAPACITY times its even share; tokens over that
get nothing from it. The table is filled in the order of tokens, so later ones are dropped first: within a sequence no token
depends on a later one, but it may depend on sequences before it in the batch. In evaluation every expert has room for every
token: nothing can be dropped, and a token's output depends on no other token at all.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skerry.models.layers import Linear

CAPACITY = 1.25
"""Slots of an expert in training, as a multiple of what it would need if all experts were used evenly."""
BALANCE = 0.01
"""Weight of `balance_loss` in each layer."""
ROUTER_SIZE = 1e-3
"""Weight of the squared log of the router's summed exponentials, which keeps its logits from growing without need."""
_ROW_MULTIPLE = 8
"""Rows of a batched product are a multiple of this: GPUs are slower at others."""
_WIDTH_MULTIPLE = 16


def expert_width(dense: int, active: int) -> int:
    """Hidden width of one expert, such that `active` of them have as many parameters as an MLP of width `dense`, up to the
    rounding that keeps matrices aligned."""
    return max(round(dense / active / _WIDTH_MULTIPLE), 1) * _WIDTH_MULTIPLE


def training_capacity(tokens: int, experts: int, active: int) -> int:
    """Slots of each expert. More than one for each token is never needed: the experts of a token are different ones."""
    slots = math.ceil(CAPACITY * tokens * active / experts)
    return min(-(-slots // _ROW_MULTIPLE) * _ROW_MULTIPLE, tokens)


class Routing(NamedTuple):
    """Where tokens go and what comes back to them. An assignment is one of the `active` experts of one token."""

    assignment_of_slot: Tensor
    """(experts × capacity). Slots left empty name some assignment as well; what they compute is never read."""
    filled: Tensor
    """(experts × capacity): whether the slot serves its assignment."""
    slot_of: Tensor
    """(tokens, active). Assignments that are dropped name slot 0."""
    kept: Tensor
    """(tokens, active): whether the assignment has a slot."""
    wanted: Tensor
    """(experts): assignments of each expert, the dropped ones too."""


def routes_of(chosen: Tensor, experts: int, capacity: int) -> Routing:
    """`chosen` (tokens, active) has the experts of each token."""
    device, assignments = chosen.device, chosen.flatten()
    count, slots = assignments.numel(), experts * capacity
    # How many assignments of its expert come before each one. The long dimension is the last: scans along others are slow.
    ranks = (assignments == torch.arange(experts, device=device)[:, None]).cumsum(dim=1, dtype=torch.int32)
    wanted = ranks[:, -1]
    rank = ranks.gather(0, assignments[None])[0] - 1
    kept = rank < capacity
    slot = assignments * capacity + rank
    # One more slot takes those that are dropped. Empty slots name different assignments rather than all the same one.
    table = torch.arange(slots + 1, device=device) % count
    table = table.scatter(0, torch.where(kept, slot, slots), torch.arange(count, device=device))[:slots]
    filled = (torch.arange(capacity, device=device) < wanted[:, None]).flatten()
    return Routing(table, filled, torch.where(kept, slot, 0).view_as(chosen), kept.view_as(chosen), wanted)


# Each direction of the way into the slots and back has its table, so gradients are gathered as well. Left to autograd they
# would be scattered, and on a GPU summed in an order that changes from one run to the next.


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
    """(slots, width) → (tokens, width): the weighted sum over each token's slots. Dropped assignments must weigh 0."""

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
    """Experts × Σ (share of assignments × mean chance) over experts: 1 if all are used evenly, more if not.

    `chances` (tokens, experts) are the router's. Only they have a gradient, which is larger the more an expert is used.
    """
    experts = chances.shape[1]
    shares = wanted / wanted.sum()
    return experts * (shares * chances.mean(dim=0)).sum()


class Expert(nn.Module):
    """Two matrices of its own: optimizers, fragments and merging treat them like any other."""

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
        """The experts' output in the shape of x and, in training, what is added to the loss for an even use of experts.

        Every island balances its experts over its own tokens.
        """
        flat = x.flatten(0, -2)
        tokens, experts = flat.shape[0], len(self.experts)
        # Never in bf16, which would leave more choices between two experts to rounding. On a GPU TF32, if the job allows that.
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(flat.to(exact), self.router.weight.to(exact))
        chances = logits.softmax(dim=-1)
        weights, chosen = chances.topk(self.active, dim=-1)
        if self.active > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # With a single expert that share would always be 1 and teach the router nothing, so its chance is the weight.
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
        """What each expert makes of its own slots: (experts, capacity, width)."""
        experts = cast("list[Expert]", self.experts)
        up = torch.stack([expert.up.weight for expert in experts])
        down = torch.stack([expert.down.weight for expert in experts])
        hidden = F.relu(torch.bmm(into, up.transpose(1, 2)))
        return torch.bmm(hidden * hidden, down.transpose(1, 2))
