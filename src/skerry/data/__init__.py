"""Corpora, tokenizers and data order."""

from skerry.data.corpus import Corpus, is_held_out, load_corpus
from skerry.data.token_files import JoinedTokens, TokenSequence
from skerry.data.tokenizer import ByteTokenizer, HFTokenizer, TokenArray, Tokenizer, tokenizer_for
from skerry.data.windows import Batch, Windows, validation_batches

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "HFTokenizer",
    "JoinedTokens",
    "TokenArray",
    "TokenSequence",
    "Tokenizer",
    "Windows",
    "is_held_out",
    "load_corpus",
    "tokenizer_for",
    "validation_batches",
]
