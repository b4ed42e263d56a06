"""The reference model: a small decoder-only transformer.

Defines the model's shape, initial weights and sampling, independent of islands, fragments and optimizers. The code uses few
operations, because at small sizes on a CPU their number costs as much as their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skerry.config import ModelConfig
from skerry.errors import ConfigError
from skerry.models.layers import Embedding, Linear
from skerry.models.moe import MixtureOfExperts, expert_width

_INIT_STD = 0.02
_NORM_EPS = 1e-6
_ROPE_BASE = 10_000.0
_MLP_RATIO = 4


@dataclass(frozen=True)
class GPTShape:
    vocab: int
    """Number of token ids."""
    context: int
    """Maximum sequence length in tokens."""
    layers: int
    width: int
    """Width of the residual stream."""
    heads: int
    """Attention heads per layer, each width / heads wide."""
    experts: int = 0
    """Experts per layer in place of the MLP; 0 for a dense model."""
    active: int = 2
    """Experts per token."""

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be >= 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigError(f"model.width must be divisible by model.heads ({self.heads}), got {self.width}")
        if self.head_width % 2:
            raise ConfigError(f"model.width / model.heads must be even, got {self.width} / {self.heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def non_embedding_parameters(self) -> int:
        hidden = _MLP_RATIO * self.width
        mlp = 2 * self.width * hidden
        if self.experts:
            mlp = self.experts * (2 * self.width * expert_width(hidden, self.active) + self.width)  # plus a row of the router
        return self.layers * (4 * self.width**2 + mlp + 2 * self.width) + self.width


@dataclass(frozen=True)
class Size:
    """A preset: the part of a shape that does not depend on the data."""

    layers: int
    width: int
    heads: int


SIZES: dict[str, Size] = {
    "1m": Size(layers=4, width=128, heads=4),
    "3m": Size(layers=4, width=256, heads=4),
    "11m": Size(layers=6, width=384, heads=6),
    "25m": Size(layers=8, width=512, heads=8),
    "50m": Size(layers=10, width=640, heads=10),
    "135m": Size(layers=14, width=896, heads=14),
    "350m": Size(layers=22, width=1152, heads=18),
    "1b": Size(layers=20, width=2048, heads=16),
}
"""Presets, named by their approximate number of non-embedding parameters."""


def shape_for(config: ModelConfig, vocab: int) -> GPTShape:
    """The preset that `model.size` names, with the overrides from the config."""
    if config.size not in SIZES:
        raise ConfigError(f"model.size must be one of {', '.join(SIZES)}, got {config.size!r}")
    size = SIZES[config.size]
    return GPTShape(
        vocab=vocab,
        context=config.context,
        layers=config.layers or size.layers,
        width=config.width or size.width,
        heads=config.heads or size.heads,
        experts=config.experts,
        active=config.active,
    )


def rotations(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for `rotate`, both (context, head_width)."""
    speeds = _ROPE_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * speeds
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding. Element i of the first half and element i of the second half form a rotated pair."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.head_width = shape.head_width
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, self.head_width)
        qk, v = qkv[:, :, :2], qkv[:, :, 2]
        # Queries and keys are normalized and rotated together, which halves the number of operations. Under autocast the
        # tables promote them to fp32, but attention needs all three in the same type.
        qk = rotate(F.rms_norm(qk, (self.head_width,), eps=_NORM_EPS), cos, sin).to(v.dtype)
        q, k = qk.unbind(dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.has_experts = shape.experts > 0
        if self.has_experts:
            self.mlp = MixtureOfExperts(shape.width, _MLP_RATIO * shape.width, shape.experts, shape.active)
        else:
            self.up = Linear(shape.width, _MLP_RATIO * shape.width)
            self.down = Linear(_MLP_RATIO * shape.width, shape.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """The block's output, and its auxiliary loss if it has experts and is in training."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        if self.has_experts:
            out, added_loss = self.mlp(self.mlp_norm(x))
            return x + out, added_loss
        hidden = F.relu(self.up(self.mlp_norm(x)))
        # Not .square(): on a CPU the backward pass of a power takes twice as long as that of a product.
        return x + self.down(hidden * hidden), None


class GPT(nn.Module):
    """Pre-norm decoder with rotary positions, QK norm, ReLU² and tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: GPTShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        cos, sin = rotations(shape.context, shape.head_width)
        # Broadcasts over queries/keys and heads: (context, 1, 1, head_width).
        self.register_buffer("cos", cos[:, None, None, :], persistent=False)
        self.register_buffer("sin", sin[:, None, None, :], persistent=False)
        self._draw_weights(seed)

    @torch.no_grad()
    def _draw_weights(self, seed: int) -> None:
        if self.embedding.weight.is_meta:
            return
        generator = torch.Generator().manual_seed(seed)
        # Matrices that write to the residual stream start smaller, so that its scale does not grow with depth.
        added_std = _INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                added = name.endswith(("attention.out.weight", "down.weight"))
                parameter.normal_(std=added_std if added else _INIT_STD, generator=generator)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the output head: (batch, length, width)."""
        return self._hidden(tokens)[0]

    def _hidden(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The input of the output head, and the auxiliary losses of the blocks."""
        length = tokens.shape[1]
        if length > self.shape.context:
            raise ValueError(f"a sequence must be at most {self.shape.context} tokens long, got {length}")
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        added_losses: list[Tensor] = []
        for block in self.blocks:
            x, added_loss = block(x, cos, sin)
            if added_loss is not None:
                added_losses.append(added_loss)
        return self.norm(x), added_losses

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, because bf16 would round away small differences between likely tokens."""
        return F.linear(hidden, self.embedding.weight).float()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocab), or, with targets, the mean cross-entropy in nats per token.

        When training a mixture of experts, the loss includes the auxiliary losses that balance the experts.
        """
        hidden, added_losses = self._hidden(tokens)
        logits = self.logits(hidden)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for added_loss in added_losses:
            loss = loss + added_loss
        return loss


def build_gpt(config: ModelConfig, vocab: int, seed: int) -> GPT:
    """A model with fresh weights on the CPU. The weights depend only on the seed; global random state is not touched."""
    with torch.device("cpu"):
        return GPT(shape_for(config, vocab), seed)


@torch.no_grad()
def generate(
    model: GPT, prompt_tokens: Iterable[int], count: int, temperature: float = 1.0, seed: int = 0, top_k: int = 0
) -> list[int]:
    """Generate `count` tokens after the prompt. Returns them without the prompt.

    Samples from the whole distribution or from the `top_k` likeliest tokens; temperature 0 always takes the likeliest.
    Sampling runs on the CPU, so that a seed gives the same draws on every device.
    """
    tokens = [int(token) for token in prompt_tokens]
    if not tokens:
        raise ConfigError("a prompt must have at least 1 token, got 0")
    if temperature < 0:
        raise ConfigError(f"temperature must be >= 0, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    start = len(tokens)
    training = model.training
    model.eval()  # in training mode, experts drop tokens
    try:
        for _ in range(count):
            window = torch.tensor([tokens[-model.shape.context :]], device=device)
            logits = model.logits(model.hidden(window)[:, -1])[0].cpu()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
                continue
            if 0 < top_k < model.shape.vocab:
                smallest = logits.topk(top_k).values[-1]
                logits = logits.masked_fill(logits < smallest, -math.inf)
            chances = F.softmax(logits / temperature, dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    finally:
        model.train(training)
    return tokens[start:]
