"""Models of pictures for the quality runs: a classifier and a decoder that writes captions.

Sizes come from the same presets as the GPT's. Every weight is a matrix in a linear layer, an embedding or a vector, because
that is what optimizers and merging tell apart. Nothing here has a shape that depends on the data.
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
"""About what patches contribute. With much smaller ones all places look alike at first, and training begins with a plateau."""


def patches(images: Tensor) -> Tensor:
    """(batch, channels, SIDE, SIDE) as (batch, PATCHES, channels * PATCH²), around zero: a grey that all patches have in common
    would hide what they differ in."""
    batch, channels = images.shape[:2]
    across = SIDE // PATCH
    tiles = (2 * images - 1).view(batch, channels, across, PATCH, across, PATCH)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(batch, PATCHES, channels * PATCH**2)


class Attention(nn.Module):
    """Every place sees the places that `seen` allows, or all of them."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.head_width = shape.heads, shape.head_width
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, self.head_width).unbind(2)
        # Under autocast norming may promote to fp32; attention wants all three in one type.
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
    """Patches and learned positions, pre-norm blocks, and losses that may count some places and not others."""

    def __init__(self, shape: GPTShape, channels: int, places: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch = Linear(channels * PATCH**2, shape.width)
        self.position = Embedding(places, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=_NORM_EPS)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """From the seed alone; to be called when all layers are there."""
        generator = torch.Generator().manual_seed(seed)
        # What is added to the residual stream is drawn smaller, so that its size does not grow with the depth.
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
        """Nats, zero where nothing is counted, and what is counted (1 or 0); both (batch, places)."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses, counted = self.losses(x, y)
        # The empty batch that a training step is captured with counts nothing, and must not make NaN.
        return losses.sum() / counted.sum().clamp(min=1)


class ViT(PictureModel):
    """Grey pictures to classes, by the mean over all patches."""

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
    """The picture's patches, then the caption. Patches see each other; a character sees the picture and what is before it."""

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
        # A caption starts as it ends, so that the first character has something to be predicted from.
        read = torch.cat((torch.full_like(y[:, :1], END), y[:, :-1]), dim=1)
        hidden = torch.cat((self.patch(patches(x)), self.embedding(read)), dim=1) + self.position.weight
        for block in self.blocks:
            hidden = block(hidden, self.seen)
        logits = F.linear(self.norm(hidden[:, PATCHES:]), self.embedding.weight).float()
        counted = (y != PAD).float()
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(counted) * counted
        return losses, counted
