"""Small GPTs for tests of the reference models."""

from __future__ import annotations

import torch

from skerry.config import ModelConfig
from skerry.models import GPT, build_gpt

SMALL = ModelConfig(layers=2, width=32, heads=4, context=16)
VOCAB = 61


def tokens_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def stirred_model(config: ModelConfig = SMALL) -> GPT:
    """A model whose weights are large and uneven enough for every part of it to show in the logits."""
    model = build_gpt(config, VOCAB, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def assert_no_token_sees_a_later_one(model: GPT) -> None:
    tokens = tokens_of(1, 1, model.shape.context)
    before = model(tokens)
    for place in (1, 7, model.shape.context - 1):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % VOCAB
        after = model(changed)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-5)
        assert (after[:, place] - before[:, place]).abs().max() > 1e-2
