"""Tokenizers: plain bytes, or a Hugging Face `tokenizer.json`.

The `tokenizers` package is an optional dependency and imported lazily.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from skerry.errors import ConfigError

TokenArray = npt.NDArray[np.integer[Any]]
"""A one-dimensional array of token ids, of any integer width."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Common names of the token that ends a document, in the order of preference."""


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab(self) -> int:
        """Every id is below this."""

    @property
    def separator(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> TokenArray:
        """The ids of a text, without a separator."""

    def encode_all(self, texts: Sequence[str]) -> list[TokenArray]:
        """The ids of many texts; faster than one by one."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids. Invalid sequences become replacement characters."""


class ByteTokenizer:
    """UTF-8 bytes as tokens; byte 0, which text does not contain, ends a document."""

    vocab = 256
    separator = 0

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # Iterating over an array of millions of bytes would take seconds.
        tokens = ids if isinstance(ids, np.ndarray) else [int(token) for token in ids]
        return np.asarray(tokens, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")


class HFTokenizer:
    """A Hugging Face tokenizer.json.

    Disables padding, truncation and special tokens, because a corpus is one stream of documents with our own separators.
    A tokenizer without an end-of-document token gets an additional id, which decodes to nothing.
    """

    def __init__(self, path: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(f"data.tokenizer {path!r} needs the tokenizers package: pip install skerry[text]") from None
        if not Path(path).is_file():
            raise ConfigError(f"data.tokenizer must be 'bytes' or the path of a tokenizer.json, got {path!r}")
        try:
            self._inner = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises bare Exception for a file it cannot parse
            raise ConfigError(f"data.tokenizer {path!r} is not a valid tokenizer.json: {_first_line(error)}") from None
        self._inner.no_padding()
        self._inner.no_truncation()
        known: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so the number of tokens is not enough.
        size = max(known.values(), default=-1) + 1
        named = next((known[name] for name in END_OF_TEXT if name in known), None)
        self.separator = size if named is None else named
        self.vocab = max(size, self.separator + 1)
        self._own_separator = named is None
        self._dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32

    def encode(self, text: str) -> TokenArray:
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, dtype=self._dtype)

    def encode_all(self, texts: Sequence[str]) -> list[TokenArray]:
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = [int(token) for token in ids]
        if self._own_separator:
            tokens = [token for token in tokens if token != self.separator]
        return str(self._inner.decode(tokens, skip_special_tokens=False))


def tokenizer_for(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    return ByteTokenizer() if name == "bytes" else HFTokenizer(name)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
