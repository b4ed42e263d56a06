"""Reading corpora, splitting them, and the tokenizers they are read with."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.config import DataConfig
from skerry.data import (
    ByteTokenizer,
    Corpus,
    HFTokenizer,
    JoinedTokens,
    TokenSequence,
    is_held_out,
    load_corpus,
)
from skerry.data.token_files import check_range
from skerry.errors import ConfigError

HALF = 0.49


def folder(root: Path, held_out: float = HALF, **settings: object) -> DataConfig:
    return DataConfig(corpus="folder", path=str(root), held_out=held_out, **settings)  # type: ignore[arg-type]


def token_files(path: Path, held_out: float = 0.1, **settings: object) -> DataConfig:
    return DataConfig(corpus="tokens", path=str(path), held_out=held_out, **settings)  # type: ignore[arg-type]


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def documents(corpus: Corpus, part: TokenSequence) -> list[str]:
    """The documents of a part, read back from its tokens."""
    tokens = part[0 : len(part)]
    assert tokens[-1] == corpus.tokenizer.separator
    ends = np.flatnonzero(tokens == corpus.tokenizer.separator)
    starts = [0, *(ends[:-1] + 1)]
    return [corpus.tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]


def many_files() -> dict[str, str | bytes]:
    return {f"sub{n % 3}/file{n}.txt": f"This is the text of file number {n}.\n" * (n % 4 + 1) for n in range(40)}


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus(DataConfig())


def test_every_standard_library_module_is_on_one_side_of_the_split(stdlib: Corpus) -> None:
    train, held_out = documents(stdlib, stdlib.train), documents(stdlib, stdlib.held_out)
    assert not set(train) & set(held_out)
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)
    root = Path(sysconfig.get_path("stdlib"))
    for module in ("argparse.py", "dataclasses.py", "json/decoder.py", "email/message.py", "chunk.py", "wave.py"):
        if (root / module).exists():
            text = (root / module).read_text("utf-8")
            assert (text in held_out) == is_held_out(module, 0.02)
            assert (text in train) != (text in held_out)


def test_installed_packages_are_not_part_of_the_standard_library(stdlib: Corpus) -> None:
    text = Path(np.__file__).read_text("utf-8")
    assert text not in documents(stdlib, stdlib.train) + documents(stdlib, stdlib.held_out)
    assert not any("build_time_vars" in text[:200] for text in documents(stdlib, stdlib.train))


def test_the_held_out_share_of_the_standard_library_is_about_what_was_asked_for(stdlib: Corpus) -> None:
    assert stdlib.vocab == 256
    total = len(stdlib.train) + len(stdlib.held_out)
    assert total > 2_000_000
    assert 0.002 < len(stdlib.held_out) / total < 0.06


def test_the_split_follows_the_hash_of_the_path_and_nothing_else(tmp_path: Path) -> None:
    files = many_files()
    corpus = load_corpus(folder(write(tmp_path / "a", files), 0.2))
    held_out = set(documents(corpus, corpus.held_out))
    for name, text in files.items():
        first_bytes = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        assert (text in held_out) == (first_bytes / 2**64 < 0.2)
    # Written in another order, in another place, and with more files around: nothing changes sides.
    elsewhere = write(tmp_path / "b" / "c", dict(reversed(files.items())))
    assert np.array_equal(load_corpus(folder(elsewhere, 0.2)).train[:], corpus.train[:])
    write(elsewhere, {"more/extra1.txt": "extra one", "more/extra2.txt": "extra two", "aaa.txt": "extra three"})
    more = load_corpus(folder(elsewhere, 0.2))
    assert held_out <= set(documents(more, more.held_out)) <= held_out | {"extra one", "extra two", "extra three"}


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=50, unique=True))
def test_a_larger_share_holds_out_all_files_of_a_smaller_one(names: list[str]) -> None:
    small, large = ({name for name in names if is_held_out(name, share)} for share in (0.1, 0.4))
    assert small <= large


def test_composed_and_decomposed_accents_are_the_same_path() -> None:
    names = [f"caf\u00e9{n}.txt" for n in range(50)]
    assert any(is_held_out(name, HALF) for name in names) and not all(is_held_out(name, HALF) for name in names)
    assert all(is_held_out(n, HALF) == is_held_out(n.replace("\u00e9", "e\u0301"), HALF) for n in names)


def test_documents_are_kept_whole_in_the_order_of_their_paths(tmp_path: Path) -> None:
    files = many_files()
    corpus = load_corpus(folder(write(tmp_path, files), 0.2))
    expected = [files[name] for name in sorted(files) if not is_held_out(name, 0.2)]
    assert documents(corpus, corpus.train) == expected


def test_only_visible_files_with_a_given_suffix_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.txt": "one",
            "b.rst": "two",
            "c.md": "three",
            ".git/d.txt": "hidden",
            ".e.txt": "hidden",
            "__pycache__/f.txt": "cache",
            "deep/er/g.txt": "four",
        },
    )
    corpus = load_corpus(folder(tmp_path, suffixes=(".txt", ".rst")))
    assert set(documents(corpus, corpus.train) + documents(corpus, corpus.held_out)) == {"one", "two", "four"}


def test_a_copy_of_a_file_is_read_once(tmp_path: Path) -> None:
    copies: dict[str, str | bytes] = {f"copy{n}.txt": "the same everywhere" for n in range(30)}
    corpus = load_corpus(folder(write(tmp_path, {**many_files(), **copies, "empty.txt": ""}), 0.2))
    texts = documents(corpus, corpus.train) + documents(corpus, corpus.held_out)
    assert texts.count("the same everywhere") == 1
    assert len(texts) == 41


def test_bytes_that_are_no_text_and_nul_do_not_break_the_reading(tmp_path: Path) -> None:
    write(tmp_path, {**many_files(), "bad.txt": b"caf\xe9 and\0nul"})
    corpus = load_corpus(folder(tmp_path, 0.2))
    assert "caf\ufffd andnul" in documents(corpus, corpus.train) + documents(corpus, corpus.held_out)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_too_few_files_for_a_share_the_end_of_the_text_is_held_out(tmp_path: Path, count: int) -> None:
    # Names for which the hash holds out nothing.
    names = [name for name in (f"{n}.txt" for n in range(100)) if not is_held_out(name, 0.1)][:count]
    files: dict[str, str | bytes] = {name: f"{name}: " + "0123456789" * 50 for name in names}
    corpus = load_corpus(folder(write(tmp_path, files), 0.1))
    whole = b"".join(str(files[name]).encode() + b"\0" for name in sorted(names))
    assert bytes(corpus.train[:]) + bytes(corpus.held_out[:]) == whole
    assert len(corpus.held_out) == len(whole) // 10


def test_one_file_that_the_hash_would_hold_out_is_still_trained_on(tmp_path: Path) -> None:
    name = next(name for name in (f"{n}.txt" for n in range(100)) if is_held_out(name, 0.1))
    corpus = load_corpus(folder(write(tmp_path, {name: "0123456789" * 50}), 0.1))
    assert (len(corpus.train), len(corpus.held_out)) == (451, 50)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path must be an existing folder, got '.*nowhere'$"):
        load_corpus(folder(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^data\.path must be an existing folder or token file, got '.*nowhere'$"):
        load_corpus(token_files(tmp_path / "nowhere"))


def test_a_folder_without_a_matching_file_says_what_was_looked_for(tmp_path: Path) -> None:
    write(tmp_path, {"a.rst": "text"})
    with pytest.raises(ConfigError, match=r"^there is no file ending in \.txt or \.md under '.*'$"):
        load_corpus(folder(tmp_path, suffixes=(".txt", ".md")))
    with pytest.raises(ConfigError, match=r"^there is no file ending in \.npy or \.bin under '.*'$"):
        load_corpus(token_files(tmp_path))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "", "b.txt": "", "c.bin": ""})
    with pytest.raises(ConfigError, match=r"^corpus 'folder' is empty: none of its files holds any text$"):
        load_corpus(folder(tmp_path))
    with pytest.raises(ConfigError, match=r"^corpus 'tokens' is empty: no file at data\.path '.*' holds any token$"):
        load_corpus(token_files(tmp_path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, many_files())
    (tmp_path / "gone.txt").symlink_to(tmp_path / "no such file")
    with pytest.raises(ConfigError, match=r"^.*gone\.txt cannot be read: No such file or directory$"):
        load_corpus(folder(tmp_path))


def test_too_little_for_one_window_is_refused(tmp_path: Path) -> None:
    config = folder(write(tmp_path, {"a.txt": "x" * 99}), 0.1)
    assert len(load_corpus(config, context=9).held_out) == 10
    line = r"^the held-out part of corpus 'folder' must hold at least 11 tokens, got 10; .*data\.held_out \(0\.1\)$"
    with pytest.raises(ConfigError, match=line):
        load_corpus(config, context=10)
    with pytest.raises(ConfigError, match=r"^the training part of corpus 'folder' must hold at least 101 tokens, got 90"):
        load_corpus(config, context=100)


@pytest.mark.parametrize(("token_bytes", "dtype"), [(2, "<u2"), (4, "<u4")])
def test_raw_token_files_are_mapped_and_their_end_is_held_out(tmp_path: Path, token_bytes: int, dtype: str) -> None:
    tokens = np.arange(250, dtype=dtype)
    (tmp_path / "all.bin").write_bytes(tokens.tobytes())
    for path in (tmp_path, tmp_path / "all.bin"):
        corpus = load_corpus(token_files(path, token_bytes=token_bytes))
        assert isinstance(corpus.train, np.memmap) and isinstance(corpus.held_out, np.memmap)
        assert corpus.train.tolist() == list(range(225))
        assert corpus.held_out.tolist() == list(range(225, 250))


def test_many_token_files_read_as_one_without_being_copied(tmp_path: Path) -> None:
    tokens = np.arange(200) % 256
    np.save(tmp_path / "a.npy", tokens[:70].astype(np.int64))
    (tmp_path / "b.bin").write_bytes(b"")
    (tmp_path / "c.bin").write_bytes(tokens[70:185].astype("<u2").tobytes())
    np.save(tmp_path / "d.npy", tokens[185:].astype(np.uint8))
    corpus = load_corpus(token_files(tmp_path))
    assert corpus.train[:].tolist() == list(range(180)) and corpus.held_out[:].tolist() == list(range(180, 200))
    assert isinstance(corpus.train, JoinedTokens)
    view = corpus.train[70:120]
    assert isinstance(view, np.memmap) and view.tolist() == list(range(70, 120))


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(-5, 40), st.integers(-5, 40))
def test_a_slice_of_joined_tokens_is_that_of_the_concatenated_array(sizes: list[int], start: int, stop: int) -> None:
    whole = np.arange(sum(sizes))
    joined = JoinedTokens(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    assert len(joined) == len(whole)
    assert joined[start:stop].tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.bin", b"abc", r"a\.bin must be a whole number of 2-byte tokens \(data\.token_bytes\), got 3 bytes"),
        ("a.npy", b"not an array", r"a\.npy is not a valid \.npy file: .*"),
        ("a.npy", b"", r"a\.npy is not a valid \.npy file: .*"),
        ("a.npy", np.zeros((2, 50), dtype=np.uint8), r"a\.npy must hold integers in one dimension, got uint8 in 2"),
        ("a.npy", np.zeros(50), r"a\.npy must hold integers in one dimension, got float64 in 1"),
        (
            "a.npy",
            np.arange(257),
            r"every token in data\.path '.*' must be in \[0, 256\), the ids of data\.tokenizer, got 256",
        ),
        (
            "a.npy",
            np.arange(-3, 99),
            r"every token in data\.path '.*' must be in \[0, 256\), the ids of data\.tokenizer, got -3",
        ),
    ],
)
def test_a_bad_token_file_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | np.ndarray[tuple[int, ...], np.dtype[np.int64]], line: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content)
    with pytest.raises(ConfigError, match=f"{line}$") as caught:
        load_corpus(token_files(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_token_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "text"})
    with pytest.raises(ConfigError, match=r"^data\.path must be a folder or end in \.npy or \.bin, got '.*a\.txt'$"):
        load_corpus(token_files(tmp_path / "a.txt"))


def test_of_a_huge_corpus_evenly_spaced_stretches_are_checked() -> None:
    tokens = np.zeros(1000, dtype=np.uint16)
    for position in range(0, 1000, 7):
        tokens[position] = 300
        with pytest.raises(ConfigError, match="got 300"):
            check_range(tokens, 256, "x", budget=1000, stretch=30)
        tokens[position] = 0
    tokens[999] = 300
    with pytest.raises(ConfigError, match="got 300"):
        check_range(tokens, 256, "x", budget=100, stretch=30)
    tokens[999] = 0
    check_range(tokens, 256, "x", budget=100, stretch=30)


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_of_any_text_decode_to_it(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint8 and tokenizer.decode(tokens) == text
    assert tokens.tolist() == list(text.encode())


def test_bytes_that_are_cut_within_a_character_still_decode() -> None:
    assert ByteTokenizer().decode([104, 105, 0xE2, 0x82]) == "hi\ufffd"


def saved_tokenizer(path: Path, special: list[str]) -> Path:
    """A byte-level BPE tokenizer trained on this file, with settings switched on that must not leak into a corpus."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", *special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(Path(__file__).read_text("utf-8").splitlines(keepends=True), trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    bpe.enable_truncation(8)
    bpe.enable_padding(length=8)
    bpe.save(str(path))
    return path


def test_a_hugging_face_tokenizer_gives_whole_texts_back_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(str(saved_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])))
    texts = ["def load(path):\n    return None\n" * 4, "x", "naïve – ünïcode 🐚", ""]
    for text, tokens in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert tokenizer.decode(tokens) == text
        assert np.array_equal(tokens, tokenizer.encode(text)) and tokens.dtype == np.uint16
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2
    assert tokenizer.vocab == 500


def test_a_corpus_read_with_a_hugging_face_tokenizer_holds_the_same_documents(tmp_path: Path) -> None:
    files = many_files()
    write(tmp_path / "texts", files)
    saved = saved_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    by_bytes = load_corpus(folder(tmp_path / "texts", 0.2))
    corpus = load_corpus(folder(tmp_path / "texts", 0.2, tokenizer=str(saved)))
    assert corpus.tokenizer.decode([corpus.tokenizer.separator]) == "<|endoftext|>"
    assert documents(corpus, corpus.train) == documents(by_bytes, by_bytes.train)
    assert documents(corpus, corpus.held_out) == documents(by_bytes, by_bytes.held_out)
    assert corpus.vocab == 500 > int(corpus.train[:].max())


def test_a_tokenizer_without_an_end_of_text_is_given_one(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(str(saved_tokenizer(tmp_path / "tokenizer.json", [])))
    assert (tokenizer.separator, tokenizer.vocab) == (500, 501)
    assert tokenizer.decode([*tokenizer.encode("one"), tokenizer.separator, *tokenizer.encode("two")]) == "onetwo"


def test_a_tokenizer_file_that_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match=r"^data\.tokenizer must be 'bytes' or the path of .*, got '.*none\.json'$"):
        load_corpus(DataConfig(tokenizer=str(tmp_path / "none.json")))
    write(tmp_path, {"bad.json": "{}"})
    with pytest.raises(ConfigError, match=r"^data\.tokenizer '.*bad\.json' is not a valid tokenizer\.json: .*$"):
        load_corpus(DataConfig(tokenizer=str(tmp_path / "bad.json")))


def test_the_missing_optional_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the tokenizers package: pip install skerry\[text\]$"):
        load_corpus(DataConfig(tokenizer="some/tokenizer.json"))
