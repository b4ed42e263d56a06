"""The matrices of a model's layers: without bias and, until the model draws its weights, without values."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """Without bias, and without the random numbers that nn.Linear would draw from the global generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """The model draws all weights itself."""
