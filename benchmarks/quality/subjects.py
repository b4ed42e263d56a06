"""The subjects of quality runs, each a model with its data: text, pictures of characters, captions, or a teacher's labels.

A subject owns its data on the device, and builds and validates its model. It does not know about islands, optimizers or
schedules. Sample n of a seed does not depend on the batch it is read in, so data-parallel training and any number of islands
see the same data.
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
"""Training seeds are >= 0, so these samples are never trained on."""
_LEAST_LENGTH = 2
"""Samples without tokens count as two, the minimum of model.context."""
_VALIDATED_AT_ONCE = 256
_BLOCK = {"cpu": 256, "cuda": 4096}
"""Pictures drawn at once. Drawing takes hundreds of small kernels, which would take a GPU longer than a training step."""
_BLOCKS_KEPT = 16
"""Islands read from different blocks at the same time."""

Draw = Callable[[int, int], tuple[Tensor, Tensor]]
"""Samples start..start+count-1 as (x, y) on the device."""


@dataclass(frozen=True)
class Sample:
    """Shape of a sample, to allocate the inputs of a captured training step."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype
    tokens: int
    """Tokens one sample counts in the budget."""


class Subject(Protocol):
    sample: Sample

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the training and held-out data."""

    def build(self, config: Config, seed: int) -> nn.Module:
        """A model with initial weights on the CPU. Its forward(x, y) is the mean loss."""

    def samples(self, seed: int) -> Draw:
        """The endless sequence of training samples of this seed."""

    def validation(self, model: nn.Module, tokens: int) -> Validation:
        """Loss on about this many tokens of held-out samples, always the same ones."""


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
        """The same samples as skerry.data.windows, gathered on the device."""
        windows = Windows(self._corpus.train, self._context, seed)

        def draw(start: int, count: int) -> tuple[Tensor, Tensor]:
            chosen = torch.tensor(windows.indices(start, count), device=self._device)
            both = self._tokens[chosen[:, None] * self._context + self._offsets].long()
            return both[:, :-1], both[:, 1:]

        return draw

    def validation(self, model: nn.Module, tokens: int) -> Validation:
        return validate(model, self._corpus, self._context, tokens, self._device)


class _DrawnSubject:
    """Base of the subjects that generate their samples."""

    sample: Sample
    _source: Glyphs | Scenes | Questions

    @functools.cached_property
    def fingerprint(self) -> str:
        x, y = self._source.batch(HELD_OUT_SEED, 0, 64)
        grey = x.mul(15).round().byte()  # rounded, so that the fingerprint is the same on every device
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
        """Loss of each sample in nats, and its count."""
        assert isinstance(model, PictureModel)
        losses, counted = model.losses(x, y)
        return losses.sum(1), counted.sum(1)


class GlyphSubject(_DrawnSubject):
    """Noisy, transformed characters in many fonts, and a vision transformer that classifies them."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._source = Glyphs(device)
        self.sample = Sample((1, SIDE, SIDE), torch.float32, (), torch.long, PATCHES)

    def build(self, config: Config, seed: int) -> nn.Module:
        return ViT(config.model, Glyphs.CLASSES, seed)

    def accuracy(self, model: nn.Module, tokens: int) -> float:
        """Share of held-out characters classified correctly."""
        assert isinstance(model, ViT)
        with torch.no_grad():
            right = torch.cat([model.logits(x).argmax(-1) == y for x, y in self._held_out(tokens)])
        return int(right.sum()) / len(right)


class CaptionSubject(_DrawnSubject):
    """Scenes of coloured shapes, and a decoder that writes captions."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._source = Scenes(device)
        tokens = PATCHES + CAPTION_LENGTH
        self.sample = Sample((3, SIDE, SIDE), torch.float32, (CAPTION_LENGTH,), torch.long, tokens)

    def build(self, config: Config, seed: int) -> nn.Module:
        return Captioner(config.model, seed)


class TeacherSubject(_DrawnSubject):
    """A small network that learns the predictions of another one from sampled labels."""

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
    """Mean loss per count, with its standard error over samples."""
    samples, counted = len(sums), sum(counts)
    mean = sum(sums) / counted
    squares = sum((loss - mean * count) ** 2 for loss, count in zip(sums, counts, strict=True))
    variance = squares / max(samples - 1, 1)
    return Validation(mean, math.sqrt(variance * samples) / counted, tokens)


_SAMPLE_LENGTHS = {"glyphs": PATCHES, "captions": PATCHES + CAPTION_LENGTH, "teacher": _LEAST_LENGTH}
SUBJECTS: dict[str, Callable[[Config, torch.device], Subject]] = {
    "text": TextSubject,
    "glyphs": GlyphSubject,
    "captions": CaptionSubject,
    "teacher": TeacherSubject,
}


def fitted(name: str, settings: Config) -> Config:
    """The settings with model.context set to the subject's sample length, from which schedules compute steps."""
    if name not in SUBJECTS:
        raise ConfigError(f"subject must be one of {', '.join(SUBJECTS)}, got {name!r}")
    length = _SAMPLE_LENGTHS.get(name, settings.model.context)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, context=length))


def subject_key(name: str, config: Config) -> Any:
    """Runs with the same key can share one subject."""
    return name, config.data, config.model.context


def build_subject(name: str, config: Config, device: torch.device) -> Subject:
    return SUBJECTS[name](config, device)
