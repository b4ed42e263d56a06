"""Token files, memory-mapped and read as one long sequence.

Supports .npy and raw little-endian integers in .bin. Files are joined without copying, because a corpus may be larger than
memory.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from skerry.data.tokenizer import TokenArray
from skerry.errors import ConfigError

SUFFIXES = (".npy", ".bin")


class TokenSequence(Protocol):
    """A sliceable sequence of tokens, such as a one-dimensional numpy array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> TokenArray: ...


class JoinedTokens:
    """Several token arrays that read as one. A slice within one array is a view; a slice across arrays is a copy."""

    def __init__(self, pieces: Sequence[TokenArray]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = list(itertools.accumulate(len(piece) for piece in self._pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, part: slice, /) -> TokenArray:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"the step of a slice of joined tokens must be 1, got {step}")
        views = self._views(start, stop)
        if len(views) == 1:
            return views[0]
        return np.concatenate(views) if views else np.empty(0, dtype=np.uint8)

    def part(self, start: int, stop: int) -> TokenSequence:
        """Tokens start..stop-1 without a copy; a plain array if they are in one file."""
        views = self._views(start, stop)
        return views[0] if len(views) == 1 else JoinedTokens(views)

    def _views(self, start: int, stop: int) -> list[TokenArray]:
        views = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[index]
            offset = end - len(self._pieces[index])
            views.append(self._pieces[index][start - offset : stop - offset])
            start, index = end, index + 1
        return views


def open_token_file(path: Path, token_bytes: int) -> TokenArray:
    """Memory-map one token file read-only. Raises ConfigError."""
    try:
        if path.suffix == ".npy":
            return _open_npy(path)
        size_bytes = path.stat().st_size
        if size_bytes % token_bytes:
            raise ConfigError(
                f"{path} must be a whole number of {token_bytes}-byte tokens (data.token_bytes), got {size_bytes} bytes"
            )
        shape = (size_bytes // token_bytes,)
        dtype = np.dtype(f"<u{token_bytes}")
        # An empty file cannot be memory-mapped.
        return np.memmap(path, dtype=dtype, mode="r", shape=shape) if size_bytes else np.empty(0, dtype=dtype)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _open_npy(path: Path) -> TokenArray:
    try:
        array: np.ndarray[tuple[int, ...], np.dtype[np.integer]] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path} is not a valid .npy file: {str(error).partition(chr(10))[0]}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{path} must hold integers in one dimension, got {array.dtype} in {array.ndim}")
    return array


def check_range(tokens: TokenSequence, vocab: int, name: str, budget: int = 1 << 26, stretch: int = 1 << 20) -> None:
    """Raise ConfigError if a token is not in [0, vocab).

    Reading a huge corpus at every start would take minutes, so beyond `budget` tokens only evenly spaced stretches are
    checked, including the last one.
    """
    total = len(tokens)
    stretches = -(-total // stretch)
    looked_at = min(stretches, -(-budget // stretch))
    for k in range(looked_at):
        index = (k + 1) * stretches // looked_at - 1
        block = tokens[index * stretch : (index + 1) * stretch]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab:
            found = low if low < 0 else high
            raise ConfigError(f"every token in {name} must be in [0, {vocab}), the ids of data.tokenizer, got {found}")
