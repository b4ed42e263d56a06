"""A corpus: what is trained on, what is held out, and the tokenizer both were read with.

Owns the reading of text and token files and the split between training and held-out data. The split depends on the
files alone, never on their order, the platform or a seed, so that every island and every later validation holds out the
same data. Writes nothing and downloads nothing.
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

# Of the standard library's folder: what is not its own, and what differs from machine to machine.
_STDLIB_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "lib2to3")
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
# Texts handed to the tokenizer at a time: enough to keep its threads busy, few enough to bound its memory.
_ENCODE_BATCH = 256


@dataclass(frozen=True)
class Corpus:
    train: TokenSequence
    """Tokens to train on: a one-dimensional integer array, or several mapped files that slice like one."""
    held_out: TokenSequence
    """Tokens to validate on, of the same kind."""
    vocab: int
    """Every token is below this."""
    tokenizer: Tokenizer
    """What the tokens were made with; for token files, what data.tokenizer says they were made with."""


def load_corpus(config: DataConfig, context: int = 1) -> Corpus:
    """Read the corpus. Each part must hold at least one window: `context` tokens and the one after them."""
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
    """Whether the file at a path (with forward slashes, from the corpus folder) is in the held-out share of files."""
    # Some file systems take accented letters apart; the composed form is the same on all of them.
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
            continue  # test data that is wrong, or in another encoding, on purpose


def _folder_documents(config: DataConfig) -> Iterator[tuple[str, str]]:
    root = Path(config.path)
    if not root.is_dir():
        raise ConfigError(f"data.path must be an existing folder, got {config.path!r}")
    for relative, content in _contents(root, config.suffixes, ()):
        yield relative, content.decode("utf-8", errors="replace")


def _contents(root: Path, suffixes: tuple[str, ...], skipped: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of every different file below a folder, in the order of the paths.

    A file with the content of an earlier one is left out: a copy on the other side of the split would be validated on
    after it was learnt by heart.
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
    """Sorted relative paths, with forward slashes, of the files below a folder; hidden ones and caches are left out."""

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
    """Tokens of the training documents and of the held-out ones, each document followed by the separator."""
    train: list[TokenArray] = []
    held_out: list[TokenArray] = []
    waiting = iter(documents)
    while batch := list(itertools.islice(waiting, _ENCODE_BATCH)):
        # NUL would read as the separator of ByteTokenizer, and means nothing in text.
        encoded = tokenizer.encode_all([text.replace("\0", "") for _, text in batch])
        for (relative, _), tokens in zip(batch, encoded, strict=True):
            part = held_out if is_held_out(relative, config.held_out) else train
            part += [tokens, np.asarray([tokenizer.separator], dtype=tokens.dtype)]
    if train and held_out:
        return np.concatenate(train), np.concatenate(held_out)
    if not train and not held_out:
        raise ConfigError(f"corpus {config.corpus!r} is empty: none of its files holds any text")
    # Too few files for a share of them to be one: the end of the text is held out instead.
    tokens = np.concatenate(train or held_out)
    cut = _tail_start(len(tokens), config.held_out)
    return tokens[:cut], tokens[cut:]


def _split_token_files(config: DataConfig, vocab: int) -> tuple[TokenSequence, TokenSequence]:
    """The first tokens of all files, in the order of their paths, and the held-out last ones."""
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
    """Where the held-out end begins: at least one token before the end."""
    return length - max(1, int(length * share))
