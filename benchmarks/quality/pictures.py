"""Endless labelled pictures for the quality runs, generated on the training device.

Every random choice is a hash of (seed, sample number, index of the choice), so a sample does not depend on its batch, and there
is nothing to store or to wait for. Everything is arithmetic on whole batches: no loop over samples, no data-dependent shapes,
no synchronization with the host.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

SIDE = 32
"""Pictures are SIDE × SIDE."""
CAPTION_LENGTH = 128
PAD = 0
END = ord("\n")


def _signed(value: int) -> int:
    """The low 64 bits of `value` as a signed integer, as torch has them."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def mixed(values: Tensor) -> Tensor:
    """Hash 64-bit numbers (the finalizer of SplitMix64)."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


class Draws:
    """Random numbers for samples start..start+count-1 of a seed. Results depend on the order of calls."""

    def __init__(self, seed: int, start: int, count: int, device: torch.device) -> None:
        numbers = torch.arange(start, start + count, device=device)
        seeded = mixed(torch.full((), _signed(seed * _GOLDEN), dtype=torch.long, device=device))
        self._samples = mixed(seeded + numbers * _GOLDEN)
        self._used = 0

    def _bits(self, each: int) -> Tensor:
        places = torch.arange(self._used + 1, self._used + each + 1, device=self._samples.device)
        self._used += each
        return mixed(self._samples[:, None] + places * _GOLDEN)

    def integers(self, limit: int, each: int) -> Tensor:
        """`each` numbers in 0..limit-1 for every sample."""
        return _shifted(self._bits(each), 33) % limit

    def units(self, each: int) -> Tensor:
        """`each` numbers in [0, 1) for every sample."""
        return _shifted(self._bits(each), 40).float() * 2.0**-24

    def normals(self, each: int) -> Tensor:
        """`each` numbers with mean 0 and deviation 1 for every sample: sums of four uniform ones, nearly normal."""
        bits = self._bits(each)
        total = sum((_shifted(bits, shift) & 0xFFFF for shift in (16, 32, 48)), bits & 0xFFFF)
        return (total.float() - 2 * 0xFFFF) * (3**0.5 / 65536)


def between(units: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * units


class Glyphs:
    """Printable ASCII characters in many fonts: grey pictures (1, SIDE, SIDE) with the character as label.

    Noise, low contrast and characters that look alike keep the loss of any model well above zero.
    """

    CHARACTERS: ClassVar[str] = "".join(chr(code) for code in range(33, 127))
    CLASSES: ClassVar[int] = len(CHARACTERS)
    _BANK_SIDE = 48
    _FONT_SIZE = 34
    _BASELINE = 35
    _BANK_PER_PIXEL = 1.3
    """At scale 1 a capital letter is about 19 of 32 pixels high."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        bank = self._render()
        self._fonts = bank.shape[0]
        self._bank = bank.flatten().to(device)
        place = torch.arange(SIDE, device=device, dtype=torch.float32) - (SIDE - 1) / 2
        self._x, self._y = place.repeat(SIDE)[None], place.repeat_interleave(SIDE)[None]

    @classmethod
    def _render(cls) -> Tensor:
        """Every character in every font, (fonts, characters, side, side) in 0..1."""
        import matplotlib
        import numpy as np
        from PIL import Image, ImageDraw, ImageFont

        side = cls._BANK_SIDE
        pictures = []
        for path in cls._font_files(Path(matplotlib.get_data_path()) / "fonts" / "ttf"):
            font = ImageFont.truetype(str(path), cls._FONT_SIZE)
            for character in cls.CHARACTERS:
                picture = Image.new("L", (side, side))
                # On the baseline, not centred vertically: position distinguishes a comma from an apostrophe.
                ImageDraw.Draw(picture).text((side / 2, cls._BASELINE), character, fill=255, font=font, anchor="ms")
                pictures.append(np.asarray(picture, dtype=np.float32) / 255)
        return torch.from_numpy(np.stack(pictures)).view(-1, cls.CLASSES, side, side)

    @classmethod
    def _font_files(cls, folder: Path) -> list[Path]:
        """Text fonts. matplotlib's other fonts contain symbols, some of them in place of letters."""
        from matplotlib.ft2font import FT2Font

        wanted = {ord(character) for character in cls.CHARACTERS}
        families = ("DejaVuSans", "DejaVuSerif", "STIXGeneral")
        found = [path for path in sorted(folder.glob("*.ttf")) if path.name.startswith(families)]
        found = [path for path in found if wanted <= set(FT2Font(str(path)).get_charmap())]
        if len(found) < 8:
            raise RuntimeError(f"pictures of characters need at least 8 text fonts in {folder}, found {len(found)}")
        return found

    def batch(self, seed: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        draws = Draws(seed, start, count, self.device)
        label = draws.integers(self.CLASSES, 1)
        font = draws.integers(self._fonts, 1)
        units = draws.units(11).unsqueeze(-1).unbind(1)
        angle = between(units[0], -0.4, 0.4)
        scale = between(units[1], 0.55, 1.15)
        stretch = between(units[2], 0.8, 1.25)
        shear = between(units[3], -0.3, 0.3)
        shift_x, shift_y = between(units[4], -4.0, 4.0), between(units[5], -4.0, 4.0)
        contrast = between(units[6], 0.25, 1.0)
        background = between(units[7], -0.5, 0.5)
        slope_x, slope_y = between(units[8], -0.02, 0.02), between(units[9], -0.02, 0.02)
        noise = between(units[10], 0.1, 0.55)
        # Map each pixel back to the rendered character, by the inverse of the picture's transformation.
        x, y = self._x - shift_x, self._y - shift_y
        x, y = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
        x = (x - shear * y) / stretch
        middle = (self._BANK_SIDE - 1) / 2
        ratio = self._BANK_PER_PIXEL / scale
        ink = self._look_up((font * self.CLASSES + label), middle + x * ratio, middle + y * ratio)
        image = background + slope_x * self._x + slope_y * self._y + contrast * (2 * ink - 1)
        image = image + noise * draws.normals(SIDE * SIDE)
        return image.view(count, 1, SIDE, SIDE), label[:, 0]

    def _look_up(self, glyph: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Bilinear lookup in the rendered characters. Positions outside are clamped to the margin, which is empty."""
        side = self._BANK_SIDE
        x, y = x.clamp(0.0, side - 1.01), y.clamp(0.0, side - 1.01)
        left, top = x.floor(), y.floor()
        along, down = x - left, y - top
        first = glyph * (side * side) + top.long() * side + left.long()
        upper = self._bank[first] * (1 - along) + self._bank[first + 1] * along
        lower = self._bank[first + side] * (1 - along) + self._bank[first + side + 1] * along
        return upper * (1 - down) + lower * down


class Scenes:
    """Three or four coloured shapes on a 3 × 3 board, and a caption that names them with random words in random order.

    The picture does not determine words and order, so the loss of any model stays above zero.
    """

    _SHAPES = 4
    _BOARD = 3
    _COLOURS: ClassVar[dict[str, tuple[float, float, float]]] = {
        "red": (0.9, 0.1, 0.1),
        "green": (0.1, 0.7, 0.2),
        "blue": (0.1, 0.2, 0.9),
        "yellow": (0.9, 0.9, 0.1),
        "orange": (0.95, 0.5, 0.1),
        "purple": (0.5, 0.1, 0.7),
        "pink": (0.95, 0.5, 0.7),
        "white": (0.95, 0.95, 0.95),
    }
    _SIZES = (("small ", "tiny "), ("large ", "big "))
    _KINDS = (
        ("circle", "disc"), ("square", "box"), ("triangle", "wedge"), ("cross", "plus"), ("ring", "hoop"), ("diamond", "gem"),
    )  # fmt: skip
    _PLACES = (
        (" top left", " upper left"), (" top", " above"), (" top right", " upper right"),
        (" left", " far left"), (" middle", " centre"), (" right", " far right"),
        (" low left", " lower left"), (" low", " below"), (" low right", " lower right"),
    )  # fmt: skip
    _BETWEEN = (", ", " and ")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._words: list[str] = [""]
        self._size_words = self._listed(self._SIZES)
        self._colour_words = self._listed([[f"{name} "] for name in self._COLOURS])[:, 0]
        self._kind_words = self._listed(self._KINDS)
        self._place_words = self._listed(self._PLACES)
        self._between_words = self._listed([self._BETWEEN])[0]
        assert set("".join(self._words)) <= set(string.ascii_lowercase + " ,")
        codes = [[*word.encode(), *[PAD] * (CAPTION_LENGTH - len(word))] for word in self._words]
        self._codes = torch.tensor(codes, device=device)
        self._lengths = torch.tensor([len(word) for word in self._words], device=device)
        self._rgb = torch.tensor(list(self._COLOURS.values()), device=device)
        self._positions = torch.arange(CAPTION_LENGTH, device=device)
        place = torch.arange(SIDE, device=device, dtype=torch.float32)
        self._x, self._y = place.view(1, 1, 1, SIDE), place.view(1, 1, SIDE, 1)
        longest = self.longest_caption()
        assert longest < CAPTION_LENGTH, f"a caption and its end must fit into {CAPTION_LENGTH} characters, got {longest}"

    def _listed(self, words: object) -> Tensor:
        """Add rows of words to the vocabulary. Returns their indices in the same layout."""
        rows = [list(row) for row in words]  # type: ignore[attr-defined]
        first = len(self._words)
        self._words += [word for row in rows for word in row]
        return torch.arange(first, len(self._words), device=self.device).view(len(rows), -1)

    def longest_caption(self) -> int:
        def longest(numbers: Tensor) -> int:
            return int(self._lengths[numbers].max())

        either = max(longest(self._size_words), longest(self._place_words))
        shape = either + longest(self._colour_words) + longest(self._kind_words)
        return self._SHAPES * shape + (self._SHAPES - 1) * longest(self._between_words)

    def batch(self, seed: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        draws = Draws(seed, start, count, self.device)
        colour = draws.integers(len(self._COLOURS), self._SHAPES)
        kind = draws.integers(len(self._KINDS), self._SHAPES)
        size = draws.integers(2, self._SHAPES)
        # The first places of a shuffled board, so that no two shapes share one.
        place = draws.units(self._BOARD**2).argsort(dim=1, stable=True)[:, : self._SHAPES]
        there = torch.ones_like(colour)
        there[:, -1:] = draws.integers(2, 1)
        return self._paint(draws, colour, kind, size, place, there), self._write(draws, colour, kind, size, place, there)

    def _paint(self, draws: Draws, colour: Tensor, kind: Tensor, size: Tensor, place: Tensor, there: Tensor) -> Tensor:
        count = colour.shape[0]
        jitter_x, jitter_y, grown = (draws.units(self._SHAPES) for _ in range(3))
        cell = SIDE / self._BOARD
        centre_x = (place % self._BOARD + 0.5) * cell - 0.5 + between(jitter_x, -1.5, 1.5)
        centre_y = (place // self._BOARD + 0.5) * cell - 0.5 + between(jitter_y, -1.5, 1.5)
        # Sizes overlap: the largest small shape is larger than the smallest large one.
        radius = (2.2 + 1.2 * size + between(grown, 0.0, 1.4))[:, :, None, None]
        inside = self._inside(self._x - centre_x[:, :, None, None], self._y - centre_y[:, :, None, None], radius)
        chosen = kind.view(count, self._SHAPES, 1, 1, 1).expand(-1, -1, 1, SIDE, SIDE)
        inside = inside.gather(2, chosen)[:, :, 0]
        cover = (inside + 0.5).clamp(0.0, 1.0) * there[:, :, None, None]
        tint = self._rgb[colour] + 0.05 * draws.normals(self._SHAPES * 3).view(count, self._SHAPES, 3)
        grey = between(draws.units(1), 0.0, 0.4)
        image = grey.view(count, 1, 1, 1).expand(count, 3, SIDE, SIDE)
        for shape in range(self._SHAPES):
            over = cover[:, shape, None]
            image = image * (1 - over) + tint[:, shape, :, None, None] * over
        image = image + 0.1 * draws.normals(3 * SIDE * SIDE).view(count, 3, SIDE, SIDE)
        return image * 2 - 1

    @staticmethod
    def _inside(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
        """Depth of each pixel inside each kind of shape, in pixels and the order of _KINDS: (count, shapes, kinds, y, x)."""
        across, along = x.abs(), y.abs()
        distance = (x * x + y * y).sqrt()
        circle = radius - distance
        square = 0.85 * radius - torch.maximum(across, along)
        triangle = torch.minimum(0.8 * radius - y, 0.9 * ((y + radius) / 2 - across))
        thin, wide = torch.minimum(across, along), torch.maximum(across, along)
        cross = torch.minimum(0.35 * radius - thin, radius - wide)
        ring = torch.minimum(circle, distance - 0.55 * radius)
        diamond = 0.7 * (1.15 * radius - across - along)
        return torch.stack([circle, square, triangle, cross, ring, diamond], dim=2)

    def _write(self, draws: Draws, colour: Tensor, kind: Tensor, size: Tensor, place: Tensor, there: Tensor) -> Tensor:
        """Captions (count, CAPTION_LENGTH): bytes, an END, then PAD."""
        count = colour.shape[0]
        which_kind, which_other, says_size = (draws.integers(2, self._SHAPES) for _ in range(3))
        between_shapes = self._between_words[draws.integers(2, self._SHAPES)]
        between_shapes[:, 0] = 0  # nothing before the first shape
        slots = [
            between_shapes,
            self._size_words[size, which_other] * says_size,
            self._colour_words[colour],
            self._kind_words[kind, which_kind],
            self._place_words[place, which_other] * (1 - says_size),
        ]
        # Word 0 is empty, so omitted words take no room.
        words = (torch.stack(slots, dim=2) * there[:, :, None]).view(count, -1)
        ends = self._lengths[words].cumsum(1)
        starts = ends - self._lengths[words]
        at = self._positions.expand(count, -1).contiguous()
        slot = torch.searchsorted(ends, at, right=True).clamp(max=words.shape[1] - 1)
        within = (at - starts.gather(1, slot)).clamp(max=CAPTION_LENGTH - 1)
        text = self._codes[words.gather(1, slot), within]
        total = ends[:, -1:]
        return torch.where(at < total, text, torch.where(at == total, END, PAD))
