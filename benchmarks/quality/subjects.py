"""What a quality run trains, and on what: text, pictures of characters, pictures with captions, or a teacher's answers.

A subject owns its data on the device and knows how to build and validate its model. It knows nothing of islands, optimizers
or schedules. Sample number n of a seed is always the same, whatever the batch it is read in: that is what lets data-parallel
training and any number of islands see the same data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from pictures import CAPTION_LENGTH, SIDE, Glyphs, Scenes
from teacher import FEATURES, Network, Questions
from torch import Tensor, nn
from vision import PATCHES, Captioner, PictureModel, ViT

from skerry.config import Config
from skerry.data.corpus import load_corpus
from skerry.data.windows import Windows
from skerry.errors import ConfigError
from skerry.models.gpt import build_gpt
from skerry.train.validate import Validation, validate

HELD_OUT_SEED = -1
"""Training has seeds from 0, so this one's samples are never trained on."""
_LEAST_LENGTH = 2
"""A context has at least two tokens, so that is what a sample without any counts for."""
_VALIDATED_AT_ONCE = 256
_BLOCK = {"cpu": 256, "cuda": 4096}
"""Pictures drawn at once. Drawing takes hundreds of small operations, which would cost a GPU more time than a training step."""
_BLOCKS_KEPT = 16
"""Islands are not all at the same place of the data."""

Draw = Callable[[int, int], tuple[Tensor, Tensor]]
"""Samples start..start+count-1 as (x, y) on the device."""


@dataclass(frozen=True)
class Sample:
    """What one sample looks like, so that inputs of a captured training step can be laid out before there is data."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype
    tokens: int
    """What one sample counts for in the budget of a run."""


class Subject(Protocol):
    sample: Sample

    @property
    def fingerprint(self) -> str:
        """Of the data, the held-out part too."""

    def build(self, config: Config, seed: int) -> nn.Module:
        """A model with fresh weights on the CPU whose forward(x, y) is the mean loss."""

    def samples(self, seed: int) -> Draw:
        """The endless sequence of training samples of this seed."""

    def validation(self, model: nn.Module, tokens: int) -> Validation:
        """Loss on about so many tokens of held-out samples, the same ones every time."""


class TextSubject:
    """A corpus and the reference GPT."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._corpus = load_corpus(config.data, config.model.context)
        self._device, self._context = device, config.model.context
        shape = (config.model.context,)
        self.sample = Sample(shape, torch.long, shape, torch.long, config.model.context)
        train = self._corpus.train
        self._tokens = torch.from_numpy(np.asarray(train[0 : len(train)]).astype(np.int32)).to(device)
        self._offsets = torch.arange(config.model.context + 1, device=device)
        parts = (train, self._corpus.held_out)
        self.fingerprint = "-".join(f"{Windows(part, config.model.context, 0).fingerprint():08x}" for part in parts)

    def build(self, config: Config, seed: int) -> nn.Module:
        return build_gpt(config.model, self._corpus.vocab, seed)

    def samples(self, seed: int) -> Draw:
        """The same samples as skerry.data.windows, gathered on the device that trains on them."""
        windows = Windows(self._corpus.train, self._context, seed)

        def draw(start: int, count: int) -> tuple[Tensor, Tensor]:
            chosen = torch.tensor(windows.indices(start, count), device=self._device)
            both = self._tokens[chosen[:, None] * self._context + self._offsets].long()
            return both[:, :-1], both[:, 1:]

        return draw

    def validation(self, model: nn.Module, tokens: int) -> Validation:
        return validate(model, self._corpus, self._context, tokens, self._device)


class _DrawnSubject:
    """What the subjects that draw their own samples have in common."""

    sample: Sample
    _source: Glyphs | Scenes | Questions

    @functools.cached_property
    def fingerprint(self) -> str:
        x, y = self._source.batch(HELD_OUT_SEED, 0, 64)
        grey = x.mul(15).round().byte()  # not what the last bit of an operation on this device happens to be
        return f"{zlib.crc32(y.cpu().numpy().tobytes(), zlib.crc32(grey.cpu().numpy().tobytes())):08x}"

    def samples(self, seed: int) -> Draw:
        if seed < 0:
            raise ConfigError(f"train.seed must be >= 0, got {seed}")
        source, size = self._source, _BLOCK[self._source.device.type]

        @functools.lru_cache(maxsize=_BLOCKS_KEPT)
        def block(number: int) -> tuple[Tensor, Tensor]:
            return source.batch(seed, number * size, size)

        def draw(start: int, count: int) -> tuple[Tensor, Tensor]:
            number, first = divmod(start, size)
            if first + count > size:
                return source.batch(seed, start, count)
            x, y = block(number)
            return x[first : first + count], y[first : first + count]

        return draw

    def validation(self, model: nn.Module, tokens: int) -> Validation:
        sums: list[float] = []
        counts: list[float] = []
        model.eval()
        with torch.no_grad():
            for x, y in self._held_out(tokens):
                losses, counted = self._losses(model, x, y)
                sums += losses.tolist()
                counts += counted.tolist()
        model.train()
        return summary(sums, counts, len(sums) * self.sample.tokens)

    def _held_out(self, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        wanted = max(1, tokens // self.sample.tokens)
        for start in range(0, wanted, _VALIDATED_AT_ONCE):
            yield self._source.batch(HELD_OUT_SEED, start, min(_VALIDATED_AT_ONCE, wanted - start))

    def _losses(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of each sample, and what is counted of it."""
        assert isinstance(model, PictureModel)
        losses, counted = model.losses(x, y)
        return losses.sum(1), counted.sum(1)


class GlyphSubject(_DrawnSubject):
    """Characters in many fonts, turned, shifted and noisy, and a vision transformer that names them."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._source = Glyphs(device)
        self.sample = Sample((1, SIDE, SIDE), torch.float32, (), torch.long, PATCHES)

    def build(self, config: Config, seed: int) -> nn.Module:
        return ViT(config.model, Glyphs.CLASSES, seed)

    def accuracy(self, model: nn.Module, tokens: int) -> float:
        """Share of the held-out characters that it names rightly."""
        assert isinstance(model, ViT)
        with torch.no_grad():
            right = torch.cat([model.logits(x).argmax(-1) == y for x, y in self._held_out(tokens)])
        return int(right.sum()) / len(right)


class CaptionSubject(_DrawnSubject):
    """Scenes of coloured shapes, and a decoder that reads the picture and writes what is in it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._source = Scenes(device)
        tokens = PATCHES + CAPTION_LENGTH
        self.sample = Sample((3, SIDE, SIDE), torch.float32, (CAPTION_LENGTH,), torch.long, tokens)

    def build(self, config: Config, seed: int) -> nn.Module:
        return Captioner(config.model, seed)


class TeacherSubject(_DrawnSubject):
    """A small network that learns what another one thinks likely, from one drawn answer a question."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._source: Questions = Questions(device)
        self.sample = Sample((FEATURES,), torch.float32, (), torch.long, _LEAST_LENGTH)

    def build(self, config: Config, seed: int) -> nn.Module:
        return Network(seed)

    def _losses(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(model, Network)
        losses = self._source.above_the_teacher(model, x)
        return losses, torch.ones_like(losses)


def summary(sums: list[float], counts: list[float], tokens: int) -> Validation:
    """Mean loss over everything counted, with the standard error of that ratio over samples."""
    samples, counted = len(sums), sum(counts)
    mean = sum(sums) / counted
    squares = sum((loss - mean * count) ** 2 for loss, count in zip(sums, counts, strict=True))
    variance = squares / max(samples - 1, 1)
    return Validation(mean, math.sqrt(variance * samples) / counted, tokens)


_OF_THEIR_OWN_LENGTH = {"glyphs": PATCHES, "captions": PATCHES + CAPTION_LENGTH, "teacher": _LEAST_LENGTH}
SUBJECTS: dict[str, Callable[[Config, torch.device], Subject]] = {
    "text": TextSubject,
    "glyphs": GlyphSubject,
    "captions": CaptionSubject,
    "teacher": TeacherSubject,
}


def fitted(name: str, settings: Config) -> Config:
    """The settings with the length of the subject's samples as model.context: schedules count steps by it."""
    if name not in SUBJECTS:
        raise ConfigError(f"subject must be one of {', '.join(SUBJECTS)}, got {name!r}")
    length = _OF_THEIR_OWN_LENGTH.get(name, settings.model.context)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, context=length))


def subject_key(name: str, config: Config) -> Any:
    """Runs with the same key can share one subject."""
    return name, config.data, config.model.context


def build_subject(name: str, config: Config, device: torch.device) -> Subject:
    return SUBJECTS[name](config, device)
