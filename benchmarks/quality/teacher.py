"""Synthetic classification: labels are drawn from the predictions of a fixed random network, the teacher.

A label is mostly chance, so gradients are noisy, the noise depends only on the batch size, and a run takes seconds on a CPU.
The validation loss is the KL divergence from the teacher: the loss above the minimum that is possible.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pictures import Draws
from torch import Tensor, nn

from skerry.models.layers import Linear

FEATURES = 32
CLASSES = 10
_WIDTH, _DEPTH = 64, 3
_TEACHER_SEED = 99
_SURE = 30.0
"""Scale of the teacher's last layer, relative to a fresh learner's, so that its predictions are not uniform."""


class Network(nn.Module):
    """A residual MLP. forward(x, y) is the mean loss."""

    def __init__(self, seed: int, *, last: float = 1.0) -> None:
        super().__init__()
        self.first = Linear(FEATURES, _WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(_WIDTH, eps=1e-6) for _ in range(_DEPTH))
        self.layers = nn.ModuleList(Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH - 1))
        self.head = Linear(_WIDTH, CLASSES)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            self.head.weight.mul_(0.1 * last)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            hidden = hidden + layer(F.gelu(norm(hidden)))
        found: Tensor = self.head(self.norms[-1](hidden))
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), y)


class Questions:
    """Samples, derived from a hash of seed and number as in pictures.py, independent of the batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.teacher = Network(_TEACHER_SEED, last=_SURE).to(device).requires_grad_(False)

    def batch(self, seed: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        draws = Draws(seed, start, count, self.device)
        x = draws.normals(FEATURES)
        below = F.softmax(self.teacher.logits(x).double(), dim=-1).cumsum(-1)
        y = (draws.units(1) >= below).sum(-1).clamp(max=CLASSES - 1)
        return x, y

    def above_the_teacher(self, learner: Network, x: Tensor) -> Tensor:
        """KL divergence of the learner from the teacher for each sample, in nats."""
        known = F.log_softmax(self.teacher.logits(x), dim=-1)
        return (known.exp() * (known - F.log_softmax(learner.logits(x), dim=-1))).sum(-1)
