"""The split of a model into fragments: whole, even, and the same everywhere."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.errors import ConfigError, JoinRefused
from skerry.tensors.fragments import Layout, Rule, TensorSpec, check_same_model, split


class Model:
    """A list of tensors under construction."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []

    def add(self, name: str, *shape: int, rule: Rule = "radial", dtype: str = "float32") -> None:
        self.specs.append(TensorSpec(name, shape, dtype, rule))

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = True) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def norm(self, name: str, width: int, bias: bool = True) -> None:
        self.add(f"{name}.weight", width)
        if bias:
            self.add(f"{name}.bias", width)

    def batch_norm(self, name: str, width: int) -> None:
        self.norm(name, width)
        self.add(f"{name}.running_mean", width, rule="average")
        self.add(f"{name}.running_var", width, rule="average")
        self.add(f"{name}.num_batches_tracked", rule="fixed", dtype="int64")

    def block(self, name: str, width: int, hidden: int, bias: bool = True) -> None:
        """A pre-norm transformer block with fused attention projections."""
        self.norm(f"{name}.ln_1", width, bias)
        self.linear(f"{name}.attn.qkv", width, 3 * width, bias)
        self.linear(f"{name}.attn.out", width, width, bias)
        self.norm(f"{name}.ln_2", width, bias)
        self.linear(f"{name}.mlp.up", width, hidden, bias)
        self.linear(f"{name}.mlp.down", hidden, width, bias)

    def llama_block(self, name: str, width: int, hidden: int, kv_width: int) -> None:
        for part, outputs in (("q", width), ("k", kv_width), ("v", kv_width), ("o", width)):
            self.linear(f"{name}.self_attn.{part}_proj", width, outputs, bias=False)
        self.linear(f"{name}.mlp.gate_proj", width, hidden, bias=False)
        self.linear(f"{name}.mlp.up_proj", width, hidden, bias=False)
        self.linear(f"{name}.mlp.down_proj", hidden, width, bias=False)
        self.norm(f"{name}.input_layernorm", width, bias=False)
        self.norm(f"{name}.post_attention_layernorm", width, bias=False)


def gpt_1m() -> Model:
    model = Model()
    model.add("embed.weight", 256, 128, rule="mean")
    for layer in range(5):
        model.block(f"blocks.{layer}", 128, 512, bias=False)
    model.norm("norm", 128, bias=False)
    model.linear("head", 128, 256, bias=False)
    return model


def gpt2_124m() -> Model:
    """The head is tied to the embedding, so it does not appear."""
    model = Model()
    model.add("wte.weight", 50257, 768, rule="mean")
    model.add("wpe.weight", 1024, 768, rule="mean")
    for layer in range(12):
        model.block(f"h.{layer}", 768, 3072)
    model.norm("ln_f", 768)
    return model


def llama(width: int, hidden: int, layers: int, kv_width: int) -> Model:
    model = Model()
    model.add("embed_tokens.weight", 128256, width, rule="mean")
    for layer in range(layers):
        model.llama_block(f"layers.{layer}", width, hidden, kv_width)
    model.norm("norm", width, bias=False)
    model.linear("lm_head", width, 128256, bias=False)
    model.add("rotary.inv_freq", 64, rule="fixed")
    return model


def llama_1b() -> Model:
    return llama(2048, 8192, 16, 512)


def llama_8b() -> Model:
    return llama(4096, 14336, 32, 1024)


def mixture_of_experts() -> Model:
    model = Model()
    model.add("embed.weight", 32000, 1024, rule="mean")
    for layer in range(8):
        at = f"layers.{layer}"
        model.norm(f"{at}.norm_1", 1024, bias=False)
        model.linear(f"{at}.qkv", 1024, 1536, bias=False)
        model.linear(f"{at}.out", 1024, 1024, bias=False)
        model.norm(f"{at}.norm_2", 1024, bias=False)
        model.linear(f"{at}.router", 1024, 8, bias=False)
        model.add(f"{at}.router.load", 8, rule="average")
        for expert in range(8):
            for part, shape in (("gate", (3584, 1024)), ("up", (3584, 1024)), ("down", (1024, 3584))):
                model.add(f"{at}.experts.{expert}.{part}", *shape)
    model.norm("norm", 1024, bias=False)
    model.linear("head", 1024, 32000, bias=False)
    return model


def vit_b(model: Model | None = None, at: str = "", width: int = 768, layers: int = 12, patch: int = 16) -> Model:
    model = model or Model()
    model.add(f"{at}cls_token", 1, 1, width)
    model.add(f"{at}pos_embed", 1, 197, width)
    model.add(f"{at}patch_embed.weight", width, 3, patch, patch)
    model.add(f"{at}patch_embed.bias", width)
    for layer in range(layers):
        model.block(f"{at}blocks.{layer}", width, 4 * width)
    model.norm(f"{at}norm", width)
    model.linear(f"{at}head", width, 1000)
    return model


def resnet_50() -> Model:
    model = Model()
    model.add("conv1.weight", 64, 3, 7, 7)
    model.batch_norm("bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            model.add(f"{at}.conv1.weight", width, inputs, 1, 1)
            model.batch_norm(f"{at}.bn1", width)
            model.add(f"{at}.conv2.weight", width, width, 3, 3)
            model.batch_norm(f"{at}.bn2", width)
            model.add(f"{at}.conv3.weight", 4 * width, width, 1, 1)
            model.batch_norm(f"{at}.bn3", 4 * width)
            if block == 0:
                model.add(f"{at}.downsample.0.weight", 4 * width, inputs, 1, 1)
                model.batch_norm(f"{at}.downsample.1", 4 * width)
            inputs = 4 * width
    model.linear("fc", 2048, 1000)
    return model


def t5() -> Model:
    model = Model()
    model.add("shared.weight", 32128, 512, rule="mean")
    for side, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for layer in range(6):
            at = f"{side}.block.{layer}"
            for attention in attentions:
                for part in ("q", "k", "v", "o"):
                    model.linear(f"{at}.{attention}.{part}", 512, 512, bias=False)
                model.norm(f"{at}.{attention}.layer_norm", 512, bias=False)
            if layer == 0:
                model.add(f"{at}.relative_attention_bias.weight", 32, 8, rule="mean")
            model.linear(f"{at}.wi", 512, 2048, bias=False)
            model.linear(f"{at}.wo", 2048, 512, bias=False)
            model.norm(f"{at}.ff.layer_norm", 512, bias=False)
        model.norm(f"{side}.final_layer_norm", 512, bias=False)
    return model


def clip() -> Model:
    model = vit_b(at="visual.", patch=32)
    model.add("text.token_embedding.weight", 49408, 512, rule="mean")
    model.add("text.positional_embedding", 77, 512)
    for layer in range(12):
        model.block(f"text.blocks.{layer}", 512, 2048)
    model.norm("text.norm", 512)
    model.add("visual.proj", 768, 512)
    model.add("text.proj", 512, 512)
    model.add("logit_scale")
    return model


def tiny_mlp() -> Model:
    model = Model()
    model.linear("0", 8, 16)
    model.linear("2", 16, 4)
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "gpt-1m": gpt_1m,
    "gpt2-124m": gpt2_124m,
    "llama-1b": llama_1b,
    "llama-8b": llama_8b,
    "moe-8": mixture_of_experts,
    "vit-b": vit_b,
    "resnet-50": resnet_50,
    "t5": t5,
    "clip": clip,
    "tiny-mlp": tiny_mlp,
}
COUNTS = range(1, 65)


@cache
def specs_of(name: str) -> tuple[TensorSpec, ...]:
    return tuple(MODELS[name]().specs)


@cache
def layouts_of(name: str) -> list[Layout]:
    return [split(specs_of(name), count) for count in COUNTS]


def assert_whole(specs: tuple[TensorSpec, ...], layout: Layout) -> None:
    """Each element of each tensor is in exactly one piece, and pieces are runs of whole rows."""
    pieces: dict[int, list[tuple[int, int]]] = {}
    for fragment in layout.fragments:
        assert list(fragment.pieces) == sorted(fragment.pieces, key=lambda p: (p.tensor, p.start))
        for piece in fragment.pieces:
            assert specs[piece.tensor].rule != "fixed"
            assert piece.start % specs[piece.tensor].row == 0 and piece.stop % specs[piece.tensor].row == 0
            assert piece.numel > 0
            pieces.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    fixed = {piece.tensor: (piece.start, piece.stop) for piece in layout.fixed.pieces}
    for index, spec in enumerate(specs):
        if spec.numel == 0:
            assert index not in pieces and index not in fixed
        elif spec.rule == "fixed":
            assert fixed[index] == (0, spec.numel)
        else:
            runs = sorted(pieces[index])
            assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])]
            assert runs[-1][1] == spec.numel
    assert [fragment.index for fragment in layout.fragments] == list(range(len(layout.fragments)))


def test_the_models_have_their_published_sizes() -> None:
    """Guards the hand-written lists: a slip there would test a model nobody has."""
    millions = {name: sum(s.numel for s in specs_of(name) if s.rule not in ("fixed", "average")) / 1e6 for name in MODELS}
    assert millions["gpt-1m"] == pytest.approx(1.0, rel=0.06)
    assert millions["gpt2-124m"] == pytest.approx(124.44, rel=1e-3)
    assert millions["llama-1b"] == pytest.approx(1498.5, rel=1e-3)  # 1.24 B and the untied head
    assert millions["llama-8b"] == pytest.approx(8030.3, rel=1e-3)
    assert millions["vit-b"] == pytest.approx(86.57, rel=1e-3)
    assert millions["resnet-50"] == pytest.approx(25.557, rel=1e-3)
    assert millions["t5"] == pytest.approx(60.5, rel=1e-2)
    assert millions["tiny-mlp"] * 1e6 == 212


@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_in_exactly_one_fragment_as_part_of_a_whole_row(name: str) -> None:
    for layout in layouts_of(name):
        assert_whole(specs_of(name), layout)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "tiny-mlp"])
def test_real_models_split_into_the_asked_number_of_even_fragments(name: str) -> None:
    for count, layout in zip(COUNTS, layouts_of(name), strict=True):
        sizes = [fragment.numel for fragment in layout.fragments]
        assert len(sizes) == count
        assert min(sizes) > 0
        assert max(sizes) * count * 3 <= sum(sizes) * 4


def test_a_tiny_model_splits_evenly_until_single_rows_fill_a_fragment() -> None:
    """212 elements in 16 rows of 8, 4 rows of 16 and 20 biases. From P = 18 on no split into whole rows is even enough."""
    for count, layout in zip(COUNTS, layouts_of("tiny-mlp"), strict=True):
        sizes = [fragment.numel for fragment in layout.fragments]
        assert len(sizes) == min(count, 40)
        assert min(sizes) > 0
        if count < 18:
            assert max(sizes) * len(sizes) * 3 <= sum(sizes) * 4
        else:
            assert max(sizes) == 16, "two short rows or one long one: the least that is possible"


@pytest.mark.parametrize("name", ["gpt2-124m", "resnet-50"])
def test_without_need_no_tensor_is_cut(name: str) -> None:
    """Merging looks at each tensor's direction, so a model that fits in few fragments stays in one piece per tensor."""
    [fragment] = layouts_of(name)[0].fragments
    assert len(fragment.pieces) == sum(spec.rule != "fixed" and spec.numel > 0 for spec in specs_of(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_split_is_the_same_every_time(name: str) -> None:
    for count in (1, 7, 24, 64):
        again = split(list(MODELS[name]().specs), count)
        assert again == layouts_of(name)[count - 1]
        assert again.digest() == layouts_of(name)[count - 1].digest()


def test_the_split_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from skerry.tensors.fragments import TensorSpec, split\n"
        "import sys, json\n"
        "specs = [TensorSpec(n, tuple(s), d, r) for n, s, d, r in json.load(sys.stdin)]\n"
        "print([split(specs, count).digest() for count in (1, 5, 24, 64)])\n"
    )
    specs = specs_of("resnet-50")
    listed = str([[s.name, list(s.shape), s.dtype, s.rule] for s in specs]).replace("'", '"')
    here = str([layouts_of("resnet-50")[count - 1].digest() for count in (1, 5, 24, 64)])
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], input=listed, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == here


def test_the_digest_tells_models_and_splits_apart() -> None:
    specs = list(specs_of("gpt-1m"))
    digest = split(specs, 8).digest()
    renamed = [dataclasses.replace(specs[0], name="other"), *specs[1:]]
    ruled = [dataclasses.replace(specs[0], rule="radial"), *specs[1:]]
    assert len({digest, split(specs, 9).digest(), split(renamed, 8).digest(), split(ruled, 8).digest()}) == 4
    half = [dataclasses.replace(spec, dtype="bfloat16") for spec in specs]
    assert split(half, 8).digest() == digest, "the storage type changes no byte on the wire"


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
rules: st.SearchStrategy[Rule] = st.sampled_from(["radial", "mean", "average", "fixed"])
random_specs = st.lists(st.tuples(shapes, rules), min_size=1, max_size=10).map(
    lambda drawn: tuple(TensorSpec(f"t{index}", shape, "float32", rule) for index, (shape, rule) in enumerate(drawn))
)


@settings(max_examples=300, deadline=None)
@given(specs=random_specs, count=st.integers(1, 80))
def test_any_model_is_split_whole_and_as_evenly_as_its_rows_allow(specs: tuple[TensorSpec, ...], count: int) -> None:
    moving = [spec for spec in specs if spec.rule != "fixed" and spec.numel]
    if not moving:
        with pytest.raises(ConfigError, match="no trainable parameters"):
            split(specs, count)
        return
    layout = split(specs, count)
    assert_whole(specs, layout)
    assert layout == split(specs, count)
    sizes = [fragment.numel for fragment in layout.fragments]
    assert len(sizes) <= count and min(sizes) > 0
    mean, longest_row = (
        sum(sizes) / min(count, sum(spec.numel // spec.row for spec in moving)),
        max(spec.row for spec in moving),
    )
    # Largest first never exceeds the mean by more than one piece, and a piece is at most an eighth of it and one row.
    assert max(sizes) <= max(mean * 4 / 3, mean + mean / 8 + longest_row)
    if longest_row <= mean / 6:
        assert max(sizes) * 3 <= mean * 4


@pytest.mark.parametrize("inputs, outputs, count", [(784, 10, 24), (1000, 2, 4), (3, 1, 24)])
def test_a_model_of_few_rows_has_fewer_fragments_rather_than_empty_ones(inputs: int, outputs: int, count: int) -> None:
    model = Model()
    model.linear("only", inputs, outputs)
    layout = split(model.specs, count)
    assert min(fragment.numel for fragment in layout.fragments) > 0
    assert layout.fixed.index == len(layout.fragments) <= 2 * outputs


def test_two_tensors_of_one_name_are_refused() -> None:
    spec = TensorSpec("w", (2, 2), "float32", "radial")
    with pytest.raises(ConfigError, match="unique, got 'w' twice"):
        split([spec, spec], 2)


# ---------------------------------------------------------------- is it the same model?


def test_the_same_model_in_another_float_type_is_accepted() -> None:
    specs = specs_of("resnet-50")
    check_same_model(specs, [dataclasses.replace(s, dtype="bfloat16") if s.dtype == "float32" else s for s in specs])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s[1:], "the run has tensor 'wte.weight' [50257, 768], this learner does not"),
        (
            lambda s: [*s, TensorSpec("extra", (3,), "float32", "radial")],
            "this learner has tensor 'extra' [3], the run does not",
        ),
        (lambda s: [dataclasses.replace(s[0], shape=(50304, 768)), *s[1:]], "[50257, 768] in the run and [50304, 768] here"),
        (lambda s: [dataclasses.replace(s[0], rule="fixed"), *s[1:]], "'wte.weight' is 'mean' in the run and 'fixed' here"),
        (lambda s: [dataclasses.replace(s[0], dtype="int64"), *s[1:]], "float32 in the run and int64 here"),
        (lambda s: [s[1], s[0], *s[2:]], "tensor 0 is 'wte.weight' in the run and 'wpe.weight' here"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(change: Callable[..., list[TensorSpec]], message: str) -> None:
    specs = list(specs_of("gpt2-124m"))
    with pytest.raises(JoinRefused) as refused:
        check_same_model(specs, change(specs))
    assert message in str(refused.value)
