"""The reference GPT: its shape, its weights, what its attention may see, and sampling from it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from gpt_models import SMALL, VOCAB, assert_no_token_sees_a_later_one, stirred_model, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.config import ModelConfig
from skerry.errors import ConfigError
from skerry.models import GPT, SIZES, GPTShape, build_gpt, generate, shape_for
from skerry.models.gpt import rotate, rotations


def plain_forward(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """The same model written out with one matrix operation per formula, in float64 and without torch's attention."""
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    shape = model.shape
    half = shape.head_width // 2

    def norm(x: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., :half], x[..., half:])
        speeds = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * speeds
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    rows = []
    for row in tokens:
        x = weights["embedding.weight"][row]
        length = len(row)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in range(shape.layers):
            at = f"blocks.{layer}."
            q, k, v = (norm(x, weights[at + "attention_norm.weight"]) @ weights[at + "attention.qkv.weight"].T).chunk(3, dim=-1)
            heads = []
            for h in range(shape.heads):
                part = slice(h * shape.head_width, (h + 1) * shape.head_width)
                scores = turned(norm(q[:, part])) @ turned(norm(k[:, part])).T / math.sqrt(shape.head_width)
                heads.append(scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v[:, part])
            x = x + torch.cat(heads, dim=-1) @ weights[at + "attention.out.weight"].T
            up = norm(x, weights[at + "mlp_norm.weight"]) @ weights[at + "up.weight"].T
            x = x + up.clamp(min=0).pow(2) @ weights[at + "down.weight"].T
        rows.append(norm(x, weights["norm.weight"]) @ weights["embedding.weight"].T)
    return torch.stack(rows)


def test_logits_equal_those_of_the_model_written_out_plainly() -> None:
    model, tokens = stirred_model(), tokens_of(0, 2, SMALL.context)
    torch.testing.assert_close(model(tokens).double(), plain_forward(model, tokens), rtol=1e-4, atol=1e-4)


def test_a_later_token_does_not_change_earlier_logits() -> None:
    assert_no_token_sees_a_later_one(stirred_model())


def test_the_model_tells_orders_of_the_same_tokens_apart() -> None:
    model = stirred_model()
    ordered, swapped = torch.tensor([[5, 9, 9, 2, 7]]), torch.tensor([[9, 5, 9, 2, 7]])
    assert (model(ordered)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-3


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 23), st.integers(0, 1000))
def test_the_product_of_turned_vectors_depends_on_their_distance_alone(a: int, b: int, shift: int, seed: int) -> None:
    cos, sin = rotations(64, 16)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))

    def product(at_q: int, at_k: int) -> float:
        return float(rotate(q, cos[at_q], sin[at_q]) @ rotate(k, cos[at_k], sin[at_k]))

    assert product(a, b) == pytest.approx(product(a + shift, b + shift), abs=1e-4)


def test_turning_changes_the_direction_of_a_vector_and_keeps_its_length() -> None:
    cos, sin = rotations(32, 8)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[0], x[0])
    assert (turned[1:] - x[1:]).abs().amax(dim=-1).min() > 1e-2


@pytest.mark.parametrize("name", list(SIZES))
def test_a_preset_has_about_the_number_of_parameters_it_is_named_after(name: str) -> None:
    with torch.device("meta"):
        model = GPT(shape_for(ModelConfig(size=name), 256))
    counted = sum(parameter.numel() for parameter in model.parameters()) - model.embedding.weight.numel()
    assert counted == model.shape.non_embedding_parameters
    named = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert 0.75 < counted / named < 1.25


def test_numbers_beside_a_size_replace_the_presets() -> None:
    shape = shape_for(ModelConfig(size="3m", layers=7, context=99), 512)
    preset = SIZES["3m"]
    assert shape == GPTShape(vocab=512, context=99, layers=7, width=preset.width, heads=preset.heads)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (ModelConfig(size="2t"), r"model\.size must be one of 1m, .*1b, got '2t'"),
        (ModelConfig(width=130), r"model\.width must be divisible by model\.heads \(4\), got 130"),
        (ModelConfig(width=20), r"model\.width / model\.heads must be even, got 20 / 4"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_its_value(config: ModelConfig, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}$"):
        shape_for(config, 256)


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model\.vocab must be >= 1, got 0$"):
        shape_for(ModelConfig(), 0)


def test_tokens_in_and_out_share_one_matrix() -> None:
    model = build_gpt(SMALL, VOCAB, seed=0)
    vocab_sized = [name for name, parameter in model.named_parameters() if VOCAB in parameter.shape]
    assert vocab_sized == ["embedding.weight"]
    hidden = model.hidden(tokens_of(0, 1, 3))
    torch.testing.assert_close(model.logits(hidden), hidden @ model.embedding.weight.T)
    model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None and (gradient[40:] != 0).all(), "tokens not in the input learn through the output"


def test_only_weights_are_saved() -> None:
    model = build_gpt(SMALL, VOCAB, seed=0)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not any(name.endswith("bias") for name in model.state_dict())


def test_the_same_seed_builds_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (build_gpt(SMALL, VOCAB, seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


def test_building_and_sampling_leave_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    generate(build_gpt(SMALL, VOCAB, seed=0), [1], 3, temperature=1.0, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_projections_into_the_residual_stream_start_smaller() -> None:
    model = build_gpt(ModelConfig(layers=8), 256, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = 0.02 / 4 if name.endswith(("attention.out.weight", "down.weight")) else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05)
        else:
            assert (parameter == 1).all()


@pytest.mark.parametrize("vocab", [61, 256, 5000])
def test_fresh_weights_give_every_token_about_the_same_chance(vocab: int) -> None:
    model = build_gpt(ModelConfig(context=32), vocab, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(vocab, (2, 4, 32), generator=generator)
    assert model(tokens, targets).item() == pytest.approx(math.log(vocab), abs=0.15)


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model, tokens, targets = stirred_model(), tokens_of(0, 3, 9), tokens_of(1, 3, 9)
    chosen = model(tokens).log_softmax(dim=-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model(tokens, targets), -chosen.mean())


def test_one_batch_can_be_learnt_by_heart() -> None:
    model, tokens = build_gpt(SMALL, VOCAB, seed=0), tokens_of(2, 4, SMALL.context + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(120):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # The first tokens of the four sequences differ, so everything after them can be known.
    assert len(set(tokens[:, 0].tolist())) == 4
    assert loss.item() < 0.1


def test_bf16_autocast_stays_close_to_fp32_and_its_logits_are_fp32() -> None:
    model, tokens, targets = stirred_model(), tokens_of(0, 4, SMALL.context), tokens_of(1, 4, SMALL.context)
    exact = model(tokens, targets)
    exact.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits, rough = model(tokens), model(tokens, targets)
    rough.backward()
    assert logits.dtype == rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None and parameter.grad is not None
        assert F.cosine_similarity(parameter.grad.flatten(), gradient.flatten(), dim=0) > 0.98


def test_the_model_compiles_as_one_graph() -> None:
    model, tokens, targets = stirred_model(), tokens_of(0, 2, SMALL.context), tokens_of(1, 2, SMALL.context)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, targets), model(tokens, targets))


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 16 tokens long, got 17"):
        build_gpt(SMALL, VOCAB, seed=0)(tokens_of(0, 1, 17))


def test_sampling_repeats_with_its_seed_and_differs_with_another() -> None:
    model = stirred_model()
    first, again, other = (generate(model, [1, 2], 12, temperature=1.0, seed=seed) for seed in (7, 7, 8))
    assert first == again != other
    assert len(first) == 12 and all(0 <= token < VOCAB for token in first)


def test_temperature_nought_and_top_one_both_take_the_likeliest_token() -> None:
    model = stirred_model()
    tokens = [3]
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, [3], 6, temperature=0.0, seed=0) == tokens[1:]
    assert generate(model, [3], 6, temperature=1.0, seed=0, top_k=1) == tokens[1:]


def test_tokens_are_drawn_with_the_models_chances() -> None:
    model = build_gpt(dataclasses.replace(SMALL, context=2), 3, seed=0)
    with torch.no_grad():
        model.embedding.weight.mul_(10)
        chances = (model(torch.tensor([[1]]))[0, -1] / 0.7).softmax(dim=-1)
    drawn = torch.tensor([generate(model, [1], 1, temperature=0.7, seed=seed)[0] for seed in range(300)])
    torch.testing.assert_close(drawn.bincount(minlength=3) / 300, chances, rtol=0, atol=0.09)


def test_sampling_sees_only_the_last_context_of_a_long_prompt() -> None:
    model = stirred_model()
    recent = tokens_of(5, SMALL.context).tolist()
    assert generate(model, [9, 9, 9, *recent], 5, temperature=1.0, seed=1) == generate(
        model, recent, 5, temperature=1.0, seed=1
    )


def test_sampling_refuses_an_empty_prompt_and_a_negative_temperature() -> None:
    model = build_gpt(SMALL, VOCAB, seed=0)
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        generate(model, [], 1, temperature=1.0, seed=0)
    with pytest.raises(ConfigError, match=r"temperature must be >= 0, got -1\.0"):
        generate(model, [1], 1, temperature=-1.0, seed=0)
