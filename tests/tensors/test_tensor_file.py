"""Files written in parts are what the library would read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from skerry.tensors import tensor_file
from skerry.tensors.tensor_file import NoSuchType, as_parts, in_one

TYPES = list(tensor_file._NAMES)


@settings(deadline=None)
@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_what_is_written_in_parts_is_read_by_the_library(
    shapes: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = {name: torch.randn(shape).mul_(9).to(dtype) for name, (dtype, shape) in shapes.items()}
    data = in_one(as_parts(tensors, metadata))
    found = load(bytes(data))
    assert found.keys() == tensors.keys()
    path = tmp_path_factory.mktemp("parts") / "file"
    path.write_bytes(data)
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == metadata
        for name, tensor in tensors.items():
            for read in (found[name], file.get_tensor(name)):
                assert read.dtype == tensor.dtype and read.shape == tensor.shape
                assert torch.equal(read.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_parts_are_the_tensors_themselves() -> None:
    tensor = torch.zeros(3)
    _, part = as_parts({"a": tensor})
    tensor[1] = 1.0
    assert bytes(part) == tensor.numpy().tobytes()


def test_a_type_that_cannot_be_written_is_said() -> None:
    with pytest.raises(NoSuchType, match="a is torch.complex64"):
        as_parts({"a": torch.zeros(1, dtype=torch.complex64)})
