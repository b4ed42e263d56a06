"""A corpus: training tokens, held-out tokens and their tokenizer.

Reads text and token files and splits them into training and held-out data. The split depends only on the files, not on their
order, the platform or a seed, so that every island and every later validation holds out the same data. Nothing is written or
downloaded.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skerry.config import DataConfig
from skerry.data.token_files import SUFFIXES, JoinedTokens, TokenSequence, check_range, open_token_file
from skerry.data.tokenizer import TokenArray, Tokenizer, tokenizer_for
from skerry.errors import ConfigError

# Not part of the standard library, or different on every machine.
_STDLIB_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "lib2to3")
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
# Texts per tokenizer call: enough to keep its threads busy, few enough to bound its memory.
_ENCODE_BATCH = 256


@dataclass(frozen=True)
class Corpus:
    train: TokenSequence
    """Training tokens: a one-dimensional integer array, or several memory-mapped files that slice like one."""
    held_out: TokenSequence
    """Validation tokens."""
    vocab: int
    """Every token is below this."""
    tokenizer: Tokenizer
    """The tokenizer of the tokens. For token files, `data.tokenizer` names it."""


def load_corpus(config: DataConfig, context: int = 1) -> Corpus:
    """Read the corpus. Raises ConfigError if either part is shorter than one window, which is `context` + 1 tokens."""
    tokenizer = tokenizer_for(config.tokenizer)
    train: TokenSequence
    held_out: TokenSequence
    if config.corpus == "tokens":
        train, held_out = _split_token_files(config, tokenizer.vocab)
    else:
        documents = _stdlib_documents() if config.corpus == "stdlib" else _folder_documents(config)
        train, held_out = _split_documents(documents, config, tokenizer)
    for part, tokens in (("training", train), ("held-out", held_out)):
        if len(tokens) <= context:
            raise ConfigError(
                f"the {part} part of corpus {config.corpus!r} must hold at least {context + 1} tokens, "
                f"got {len(tokens)}; give more data or change data.held_out ({config.held_out})"
            )
    return Corpus(train, held_out, tokenizer.vocab, tokenizer)


def is_held_out(relative_path: str, share: float) -> bool:
    """Whether a file belongs to the held-out share. The path is relative to the corpus folder, with forward slashes."""
    # Some file systems decompose accented letters, so normalize the name.
    name = unicodedata.normalize("NFC", relative_path).encode("utf-8", errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < int(share * 2**64)


def _stdlib_documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for relative, content in _contents(root, (".py",), _STDLIB_SKIPPED_FOLDERS):
        if relative.rpartition("/")[2].startswith(_STDLIB_SKIPPED_FILES):
            continue
        try:
            yield relative, content.decode("utf-8")
        except UnicodeDecodeError:
            continue  # test data that is invalid or in another encoding on purpose


def _folder_documents(config: DataConfig) -> Iterator[tuple[str, str]]:
    root = Path(config.path)
    if not root.is_dir():
        raise ConfigError(f"data.path must be an existing folder, got {config.path!r}")
    for relative, content in _contents(root, config.suffixes, ()):
        yield relative, content.decode("utf-8", errors="replace")


def _contents(root: Path, suffixes: tuple[str, ...], skipped: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of every file below a folder, sorted by path.

    Skips empty files and duplicates: validating on a copy of a training file would be meaningless.
    """
    seen = set()
    for relative in _paths(root, suffixes, skipped):
        path = root / relative
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            yield relative, content


def _paths(root: Path, suffixes: tuple[str, ...], skipped: tuple[str, ...] = ()) -> list[str]:
    """Sorted relative paths, with forward slashes, of the files below a folder, without hidden files and caches."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s != "__pycache__" and s not in skipped]
        within = Path(folder).relative_to(root)
        found += [(within / n).as_posix() for n in names if n.endswith(suffixes) and not n.startswith(".")]
    if not found:
        raise ConfigError(f"there is no file ending in {' or '.join(suffixes) or 'data.suffixes'} under {str(root)!r}")
    return sorted(found)


def _split_documents(
    documents: Iterable[tuple[str, str]], config: DataConfig, tokenizer: Tokenizer
) -> tuple[TokenArray, TokenArray]:
    """Tokens of the training and held-out documents, each document followed by the separator."""
    train: list[TokenArray] = []
    held_out: list[TokenArray] = []
    waiting = iter(documents)
    while batch := list(itertools.islice(waiting, _ENCODE_BATCH)):
        # NUL is the separator of ByteTokenizer and has no meaning in text.
        encoded = tokenizer.encode_all([text.replace("\0", "") for _, text in batch])
        for (relative, _), tokens in zip(batch, encoded, strict=True):
            part = held_out if is_held_out(relative, config.held_out) else train
            part += [tokens, np.asarray([tokenizer.separator], dtype=tokens.dtype)]
    if train and held_out:
        return np.concatenate(train), np.concatenate(held_out)
    if not train and not held_out:
        raise ConfigError(f"corpus {config.corpus!r} is empty: none of its files holds any text")
    # With few files all may fall on one side. Then hold out the end of the text.
    tokens = np.concatenate(train or held_out)
    cut = _tail_start(len(tokens), config.held_out)
    return tokens[:cut], tokens[cut:]


def _split_token_files(config: DataConfig, vocab: int) -> tuple[TokenSequence, TokenSequence]:
    """Tokens of all files, sorted by path, split into training tokens and a held-out tail."""
    root = Path(config.path)
    if not root.exists():
        raise ConfigError(f"data.path must be an existing folder or token file, got {config.path!r}")
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ConfigError(f"data.path must be a folder or end in {' or '.join(SUFFIXES)}, got {config.path!r}")
        paths = [root]
    else:
        paths = [root / relative for relative in _paths(root, SUFFIXES)]
    tokens = JoinedTokens([open_token_file(path, config.token_bytes) for path in paths])
    if not len(tokens):
        raise ConfigError(f"corpus 'tokens' is empty: no file at data.path {config.path!r} holds any token")
    check_range(tokens, vocab, f"data.path {config.path!r}")
    cut = _tail_start(len(tokens), config.held_out)
    return tokens.part(0, cut), tokens.part(cut, len(tokens))


def _tail_start(length: int, share: float) -> int:
    """Where the held-out tail starts. It has at least one token."""
    return length - max(1, int(length * share))
