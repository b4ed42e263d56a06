"""Layers that have no values until their model draws them: torch's own would draw random numbers from the global generator."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """Without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """The model draws all weights itself."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """The model draws all weights itself."""
