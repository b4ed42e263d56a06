"""The mixture of experts: routing against a plain loop over tokens, capacity, balance, and its place in the reference GPT."""

from __future__ import annotations

import math

import gpt_models
import pytest
import torch
import torch.nn.functional as F
from gpt_models import VOCAB, assert_no_token_sees_a_later_one, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.config import ModelConfig, TrainConfig
from skerry.models import GPT, SIZES, build_gpt, generate, shape_for
from skerry.models.moe import BALANCE, ROUTER_SIZE, MixtureOfExperts, balance_loss, expert_width, routes_of, training_capacity
from skerry.tensors.model import model_tensors
from skerry.train.job import build_optimizers

WIDTH, DENSE = 16, 64
SMALL = ModelConfig(layers=2, width=32, heads=4, context=16, experts=4)


def layer_of(experts: int, active: int, seed: int = 0) -> MixtureOfExperts:
    layer = MixtureOfExperts(WIDTH, DENSE, experts, active).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return layer


def stirred_model(config: ModelConfig = SMALL) -> GPT:
    return gpt_models.stirred_model(config)


def one_by_one(layer: MixtureOfExperts, x: torch.Tensor, capacity: float = math.inf) -> torch.Tensor:
    """The same layer as a loop over tokens and their experts; an expert that has served `capacity` tokens serves no more."""
    served = [0] * len(layer.experts)
    rows = []
    for token in x.flatten(0, 1):
        chances = (layer.router.weight @ token).softmax(dim=0)
        best = sorted(range(len(served)), key=lambda expert: -chances[expert].item())[: layer.active]
        total = sum(chances[expert] for expert in best) if layer.active > 1 else 1.0
        row = torch.zeros_like(token)
        for expert in best:
            if served[expert] < capacity:
                served[expert] += 1
                up, down = layer.experts[expert].up.weight, layer.experts[expert].down.weight
                row = row + chances[expert] / total * (down @ (up @ token).clamp(min=0).pow(2))
        rows.append(row)
    return torch.stack(rows).view_as(x)


def gradients(layer: MixtureOfExperts, x: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
    weighing = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return list(torch.autograd.grad((out * weighing).sum(), [x, *layer.parameters()], materialize_grads=True))


@pytest.mark.parametrize(("experts", "active"), [(4, 2), (5, 3), (4, 1), (3, 3), (8, 2)])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens(experts: int, active: int, training: bool) -> None:
    layer = layer_of(experts, active).train(training)
    with torch.no_grad():
        layer.router.weight[0].add_(0.3)  # a favourite, so that in training some tokens are dropped
    x = torch.randn(3, 20, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    x.requires_grad_()
    capacity = training_capacity(60, experts, active) if training else math.inf
    out, expected = layer(x)[0], one_by_one(layer, x, capacity)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients(layer, x, out), gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    if training and active < experts:
        assert not torch.allclose(expected, one_by_one(layer, x)), "nothing was dropped, so dropping was not tested"


def test_an_expert_that_all_tokens_want_serves_the_first_until_it_is_full() -> None:
    layer = layer_of(4, 1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x = torch.rand(2, 40, WIDTH, dtype=torch.float64) + 0.1
    capacity = training_capacity(80, 4, 1)
    assert capacity == 32, "a quarter of 80, a quarter more, and up to whole eights"
    out = layer.train()(x)[0].flatten(0, 1)
    assert (out[:capacity].abs().amax(dim=1) > 0).all() and (out[capacity:] == 0).all()
    assert (layer.eval()(x)[0].abs().amax(dim=-1) > 0).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(2, 9), st.data())
def test_every_slot_and_assignment_agree_about_each_other(tokens: int, experts: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, experts))
    capacity = data.draw(st.integers(1, tokens))
    seed = data.draw(st.integers(0, 10_000))
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(active).indices
    routes = routes_of(chosen, experts, capacity)
    waiting = [chosen.flatten().eq(expert).nonzero().flatten().tolist() for expert in range(experts)]
    assert routes.wanted.tolist() == [len(line) for line in waiting]
    table = routes.assignment_of_slot.view(experts, capacity)
    for expert, line in enumerate(waiting):
        served = line[:capacity]
        assert routes.filled.view(experts, capacity)[expert].tolist() == [n < len(served) for n in range(capacity)]
        assert table[expert, : len(served)].tolist() == served
        assert routes.slot_of.flatten()[served].tolist() == [expert * capacity + n for n in range(len(served))]
        assert routes.kept.flatten()[line].tolist() == [n < capacity for n in range(len(line))]
    assert int(table.min()) >= 0 and int(table.max()) < tokens * active


def test_even_use_of_experts_has_a_balance_loss_of_one_and_uneven_use_more() -> None:
    even = torch.full((32, 4), 0.25)
    assert balance_loss(even, torch.tensor([16, 16, 16, 16])).item() == pytest.approx(1)
    assert balance_loss(torch.tensor([[1.0, 0, 0, 0]] * 32), torch.tensor([32, 0, 0, 0])).item() == pytest.approx(4)


def test_in_training_the_layer_adds_the_weighed_losses_and_in_evaluation_none() -> None:
    layer = layer_of(4, 2)
    with torch.no_grad():
        layer.router.weight.zero_()
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    assert layer.train()(x)[1].item() == pytest.approx(BALANCE + ROUTER_SIZE * math.log(4) ** 2)
    assert layer.eval()(x)[1] is None


def test_the_balance_loss_turns_tokens_away_from_a_crowded_expert() -> None:
    layer = layer_of(4, 1).train()
    x = torch.rand(4, 16, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.mul_(0.1)
        layer.router.weight[1] += 0.1
    before = layer.router.weight.detach().clone()
    layer(x)[1].backward()
    assert layer.router.weight.grad is not None
    step = before - layer.router.weight.grad
    mean = x.mean(dim=(0, 1))
    assert (mean @ before.T).argmax() == 1 and mean @ (step - before)[1] < 0


def test_a_models_loss_is_cross_entropy_in_evaluation_and_more_in_training() -> None:
    model, tokens, targets = stirred_model(), tokens_of(0, 3, 9), tokens_of(1, 3, 9)
    model.train()
    trained, logits = model(tokens, targets), model(tokens)
    added = trained - F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert added.item() > 2 * BALANCE * 0.99, "each layer adds its own, and even use adds least"
    model.eval()
    torch.testing.assert_close(model(tokens, targets), F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("training", [False, True])
def test_a_later_token_does_not_change_earlier_logits(training: bool) -> None:
    assert_no_token_sees_a_later_one(stirred_model().train(training))


def test_in_evaluation_a_sequence_does_not_depend_on_others_in_its_batch() -> None:
    model, tokens = stirred_model().eval(), tokens_of(1, 4, SMALL.context)
    alone = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=0, atol=1e-5)


def test_sampling_drops_nothing_and_leaves_the_mode_as_it_was() -> None:
    model = stirred_model().eval()
    tokens = [3]
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    for training in (True, False):
        assert generate(model.train(training), [3], 12, temperature=0.0) == tokens[1:]
        assert model.training == training


@pytest.mark.parametrize("name", list(SIZES))
@pytest.mark.parametrize(("experts", "active"), [(4, 1), (8, 2), (16, 3)])
def test_parameters_are_counted_and_a_token_uses_as_many_as_in_the_dense_model(name: str, experts: int, active: int) -> None:
    config = ModelConfig(size=name, experts=experts, active=active)
    with torch.device("meta"):
        model = GPT(shape_for(config, 256))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name != "embedding.weight"}
    assert sum(sizes.values()) == model.shape.non_embedding_parameters
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    routers = sum(size for name, size in sizes.items() if ".router." in name)
    used = sum(sizes.values()) - routers - of_experts + of_experts * active // experts
    dense = shape_for(ModelConfig(size=name), 256).non_embedding_parameters
    assert used == pytest.approx(dense, rel=0 if active < 3 else 0.03)


def test_an_experts_width_is_rounded_to_aligned_matrices() -> None:
    assert [expert_width(512, active) for active in (1, 2, 3, 4, 8, 512)] == [512, 256, 176, 128, 64, 16]


def test_a_dense_model_has_no_trace_of_experts() -> None:
    names = [name for name, _ in build_gpt(ModelConfig(layers=1), VOCAB, seed=0).named_parameters()]
    parts = ["attention_norm", "attention.qkv", "attention.out", "mlp_norm", "up", "down"]
    assert names == ["embedding.weight", *(f"blocks.0.{part}.weight" for part in parts), "norm.weight"]


def test_matrices_of_experts_are_optimized_and_merged_like_any_other() -> None:
    model = build_gpt(SMALL, VOCAB, seed=0)
    ours = {f"blocks.1.mlp.experts.{n}.{part}.weight" for n in range(4) for part in ("up", "down")}
    ours.add("blocks.1.mlp.router.weight")
    tensors = {spec.name: (spec, tensor) for spec, tensor in model_tensors(model)}
    assert ours == {name for name in tensors if name.startswith("blocks.1.mlp.")}
    assert all(tensors[name][0].rule == "radial" and len(tensors[name][0].shape) == 2 for name in ours)
    for optimizer in ("muon", "adamw"):
        first = build_optimizers(model, TrainConfig(optimizer=optimizer))[0].param_groups[0]
        assert {id(tensors[name][1]) for name in ours} <= {id(parameter) for parameter in first["params"]}
        assert first["weight_decay"] > 0


def test_experts_that_no_token_chose_have_a_gradient_of_nought() -> None:
    model = build_gpt(SMALL, VOCAB, seed=0).train()
    model(torch.tensor([[1]]), torch.tensor([[2]])).backward()
    experts = [expert for block in model.blocks for expert in block.mlp.experts]
    unused = [expert for expert in experts if (expert.up.weight.grad == 0).all()]
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(unused) == 4, "two of four in each of two layers"
    assert all((expert.down.weight.grad == 0).all() for expert in unused)


def test_under_bf16_autocast_the_router_stays_in_fp32() -> None:
    layer = layer_of(4, 2).float().train()
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    exact, added = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rough, rough_added = layer(x)
    assert rough.dtype == rough_added.dtype == torch.float32
    assert torch.equal(added, rough_added), "the same logits to the bit"
    assert not torch.equal(exact, rough), "the products are in bf16"
    assert F.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.999


def test_a_layer_in_bf16_computes_its_router_in_fp32_and_returns_bf16() -> None:
    layer = layer_of(4, 2).bfloat16().train()
    out, added = layer(torch.randn(2, 8, WIDTH, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16 and added.dtype == torch.float32


@pytest.mark.parametrize("training", [False, True])
def test_the_model_compiles_as_one_graph_of_fixed_shapes(training: bool) -> None:
    model, tokens, targets = stirred_model().train(training), tokens_of(0, 2, SMALL.context), tokens_of(1, 2, SMALL.context)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    found = []
    for forward in (model, compiled):
        model.zero_grad()
        loss = forward(tokens, targets)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_one_batch_can_be_learnt_by_heart() -> None:
    model, tokens = build_gpt(SMALL, VOCAB, seed=0), tokens_of(2, 4, SMALL.context + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Not the last: a loss near nought jumps for some steps whenever a token changes its expert.
    assert min(losses) < 0.1
