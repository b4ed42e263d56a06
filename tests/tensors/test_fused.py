"""The kernels that encode on a GPU, without a GPU: what they do in Triton's interpreter, and what is compiled of them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from skerry.tensors.codecs import fused
from skerry.tensors.codecs.block import BLOCK, Blocks, in_rows
from skerry.tensors.codecs.codec import codec

CODECS = ("int8", "int4", "fp8", "e3m0", "topk1", "topk3")
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no Triton for this platform")

INTERPRETED = """
import sys, torch
from skerry.tensors.codecs import fused
from skerry.tensors.codecs.codec import codec

def vectors():
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 127, 129, 4096, 4097, 9001):
        values = torch.randn(numel, generator=generator)
        yield values
        yield values * 10.0 ** (20 * torch.rand(numel, generator=generator) - 10)
        yield values.round()
        yield torch.zeros(numel).copysign(values)
        yield values * 1e-31
        yield values * 1e37
    yield fused.trial(torch.device("cpu"))

name = sys.argv[1]
one, compared = codec(name), 0
for vector in vectors():
    wanted, found = one.encode_in_parts(vector), one.encode_in_one_pass(vector)
    assert torch.equal(wanted, found), (name, compared, len(vector), int((wanted != found).sum()))
    compared += 1
print(compared)
"""

NOT_FINITE = """
import torch
from skerry.tensors.codecs.codec import codec

for name in ("int8", "int4", "fp8", "e3m0"):
    for value in (float("nan"), float("inf"), float("-inf")):
        vector = torch.ones(300)
        vector[140] = value
        one = codec(name)
        values = one.decode(one.encode_in_one_pass(vector), 300)
        assert not torch.isfinite(values[128:256]).any(), (name, value)
        assert torch.equal(values[:128], values[256:].repeat(3)[:128]), (name, value)
        assert torch.allclose(values[:128], vector[:128], rtol=0.01), (name, value)
"""


def interpreted(script: str, *arguments: str) -> str:
    """Triton decides when it is imported whether it compiles, hence a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", CODECS)
def test_one_pass_gives_the_bytes_of_several(name: str) -> None:
    assert int(interpreted(INTERPRETED, name)) == 6 * 6 + 1


def test_what_is_not_finite_spoils_its_block_alone() -> None:
    interpreted(NOT_FINITE)


def test_nothing_is_rounded_once_that_should_be_rounded_twice() -> None:
    """A compiler may take a product and a sum as one operation, which rounds another way about once in a million elements."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    pointers = {"values": "*fp32", "scales_out": "*i16", "bytes_out": "*u8"}
    numbers = {"numel": "i32", "count": "i32", "share": "fp32", "largest": "fp32"}
    fixed = {"BLOCK": BLOCK, "ROWS": fused.ROWS}
    for kind in range(len(fused.KINDS)):
        constants = {**fixed, "KIND": kind}
        signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=fused._encode_kernel, signature=signature, constexprs=constants)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=fused.OPTIONS)
        assert "fma." not in made.asm["ptx"], fused.KINDS[kind]
        assert "mul.f32" in made.asm["ptx"] or "mul.rn.f32" in made.asm["ptx"]


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_the_trial_shows_a_product_and_a_sum_that_are_rounded_as_one(name: str) -> None:
    blocks, one = in_rows(fused.trial(CPU), BLOCK), codec(name)
    assert isinstance(one, Blocks)
    reach = blocks.abs().amax(dim=1)
    scales = (reach * (1.0 / one.largest)).to(torch.bfloat16).float()
    inverse = torch.where(reach < 1e-30, torch.zeros(()), 1.0 / scales)[:, None]
    twice, once = (blocks * inverse).round().double(), (blocks.double() * inverse.double()).round()
    assert (twice != once).sum() > 1000


@pytest.mark.parametrize("fault", ["other bytes", "no kernel"])
def test_a_kernel_that_is_not_right_is_not_used_and_named_once(fault: str, caplog) -> None:
    one = codec("int4")

    def kernel(vector: torch.Tensor) -> torch.Tensor:
        if fault == "no kernel":
            raise RuntimeError("no compiler here")
        data = one.encode(vector).clone()
        data[-1] ^= 1
        return data

    fused._trusted.clear()
    with caplog.at_level(logging.WARNING, "skerry.learner"):
        assert not any(fused.trusted("int4", CPU, kernel, one.encode) for _ in range(3))
    reason = "no compiler here" if fault == "no kernel" else "its output differs"
    assert [record.getMessage() for record in caplog.records] == [
        f"no fused GPU kernel for codec int4, encoding will be slower: {reason}"
    ]
    fused._trusted.clear()
    assert fused.trusted("int4", CPU, one.encode, one.encode)
    fused._trusted.clear()
