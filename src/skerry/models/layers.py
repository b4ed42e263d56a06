"""Layers without initialization. torch's own layers would draw from the global random generator; the model draws all weights
itself."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Does nothing."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Does nothing."""
