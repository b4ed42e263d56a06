"""Picture models for the quality runs: a classifier and a decoder that writes captions.

Sizes come from the GPT's presets. Every weight is a matrix in a linear layer, an embedding or a vector, because optimizers and
merging distinguish these. No shape depends on the data.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pictures import CAPTION_LENGTH, END, PAD, SIDE
from torch import Tensor, nn

from skerry.config import ModelConfig
from skerry.models.gpt import GPTShape, shape_for
from skerry.models.layers import Embedding, Linear

PATCH = 4
PATCHES = (SIDE // PATCH) ** 2
BYTES = 128
"""Captions are ASCII."""
_NORM_EPS = 1e-6
_INIT_STD = 0.02
_POSITION_STD = 0.3
"""About the scale of the patches. Much smaller positions all look alike at first, and training starts with a plateau."""


def patches(images: Tensor) -> Tensor:
    """(batch, channels, SIDE, SIDE) as (batch, PATCHES, channels * PATCH²), centred around zero: a common grey would hide the
    differences between patches."""
    batch, channels = images.shape[:2]
    across = SIDE // PATCH
    tiles = (2 * images - 1).view(batch, channels, across, PATCH, across, PATCH)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(batch, PATCHES, channels * PATCH**2)


class Attention(nn.Module):
    """Self-attention with the mask `seen`, or over all positions."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.head_width
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.head_width).unbind(2)
        # Under autocast the norms may promote to fp32, but attention needs one dtype.
        q = F.rms_norm(q, (self.head_width,), eps=_NORM_EPS).to(v.dtype)
        k = F.rms_norm(k, (self.head_width,), eps=_NORM_EPS).to(v.dtype)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)
        self.up = Linear(shape.width, 4 * shape.width)
        self.down = Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seen)
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class PictureModel(nn.Module):
    """Patches, learned positions and pre-norm blocks. Losses may count only some positions."""

    def __init__(self, shape: GPTShape, channels: int, places: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch = Linear(channels * PATCH**2, shape.width)
        self.position = Embedding(places, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Initialize all weights from the seed. Call it after all layers are created."""
        generator = torch.Generator().manual_seed(seed)
        # Smaller weights into the residual stream, so that its scale does not grow with depth.
        added_std = _INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if name == "patch.weight":
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            elif name == "position.weight":
                parameter.normal_(std=_POSITION_STD, generator=generator)
            elif parameter.ndim == 2:
                added = name.endswith(("attention.out.weight", "down.weight"))
                parameter.normal_(std=added_std if added else _INIT_STD, generator=generator)

    def losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Losses in nats, zero where not counted, and counts (1 or 0); both (batch, positions)."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses, counted = self.losses(x, y)
        # The all-zero batch of the graph capture counts nothing and must not produce NaN.
        return losses.sum() / counted.sum().clamp(min=1)


class ViT(PictureModel):
    """Classify grey pictures, with mean pooling over patches."""

    def __init__(self, config: ModelConfig, classes: int, seed: int) -> None:
        super().__init__(shape_for(config, classes), channels=1, places=PATCHES)
        self.head = Linear(self.shape.width, classes)
        self.draw_weights(seed)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.patch(patches(x)) + self.position.weight
        for block in self.blocks:
            hidden = block(hidden, None)
        found: Tensor = self.head(self.norm(hidden.mean(1))).float()
        return found

    def losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(self.logits(x), y, reduction="none")[:, None]
        return losses, torch.ones_like(losses)


class Captioner(PictureModel):
    """A decoder over patches, then caption. Patches see all patches; a character sees the picture and earlier characters."""

    seen: Tensor

    def __init__(self, config: ModelConfig, seed: int) -> None:
        places = PATCHES + CAPTION_LENGTH
        super().__init__(shape_for(config, BYTES), channels=3, places=places)
        self.embedding = Embedding(BYTES, self.shape.width)
        self.draw_weights(seed)
        seen = torch.ones(places, places, dtype=torch.bool).tril()
        seen[:PATCHES, :PATCHES] = True
        self.register_buffer("seen", seen, persistent=False)

    def losses(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # END also starts a caption, so that the first character has an input.
        read = torch.cat((torch.full_like(y[:, :1], END), y[:, :-1]), dim=1)
        hidden = torch.cat((self.patch(patches(x)), self.embedding(read)), dim=1) + self.position.weight
        for block in self.blocks:
            hidden = block(hidden, self.seen)
        logits = F.linear(self.norm(hidden[:, PATCHES:]), self.embedding.weight).float()
        counted = (y != PAD).float()
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(counted) * counted
        return losses, counted
