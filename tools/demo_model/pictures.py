"""The seeded generator of pictures: coloured shapes, digits and short words, each with the sentence that is right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from .phrases import HELD_OUT, draw_in_split
from .words import WORDS, made_up_word

Colour = tuple[int, ...]
Point = tuple[float, float]

# What a name covers: colours between these two, and a little around them.
COLOURS: dict[str, tuple[Colour, Colour]] = {
    "red": ((255, 0, 0), (200, 30, 40)),
    "orange": ((255, 165, 0), (245, 125, 25)),
    "yellow": ((255, 255, 0), (240, 212, 40)),
    "green": ((0, 128, 0), (40, 205, 70)),
    "blue": ((0, 0, 255), (40, 100, 225)),
    "purple": ((128, 0, 128), (140, 60, 190)),
    "black": ((0, 0, 0), (35, 35, 35)),
    "white": ((255, 255, 255), (240, 240, 240)),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
DIGITS = "0123456789"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST = 5  # letters of a word
NOTHING = "I see no shape that I know."
_WEIGHTS = {"one_shape": 25, "two_shapes": 26, "digits": 20, "word": 26, "nothing": 3}
KINDS = tuple(_WEIGHTS)
_LEAST_CONTRAST = 120.0  # between a colour and what it is drawn on: a distance in RGB


@dataclass(frozen=True)
class Part:
    """Something in a picture: a shape's name with its colour, or a character. `box` is left, top, right, bottom, in
    pixels.
    """

    what: str
    box: tuple[float, float, float, float]
    colour: str = ""


@dataclass(frozen=True)
class Picture:
    """An image, what is in it from left to right or from top to bottom, and the sentence that says so."""

    kind: str
    image: Image.Image
    parts: tuple[Part, ...]
    sentence: str


def _towards(one: Colour, other: Colour, share: float) -> Colour:
    return tuple(round(a + (b - a) * share) for a, b in zip(one, other, strict=True))


def _stirred(rng: random.Random, colour: Colour, most: int) -> Colour:
    return tuple(min(255, max(0, level + rng.randint(-most, most))) for level in colour)


def _colour(rng: random.Random, name: str) -> Colour:
    return _stirred(rng, _towards(*COLOURS[name], rng.random()), 8)


def _ground_colour(rng: random.Random) -> Colour:
    kind = rng.random()
    if kind < 0.35:
        return _stirred(rng, (250, 250, 250), 5)
    if kind < 0.45:
        return (rng.randint(0, 60),) * 3
    if kind < 0.7:
        return _stirred(rng, (205, 205, 205), 50)
    return tuple(rng.randint(0, 255) for _ in range(3))


def _ground(rng: random.Random, size: tuple[int, int]) -> tuple[Image.Image, Colour]:
    """A background, plain, graded or mottled, and its mean colour."""
    colour = _ground_colour(rng)
    kind = rng.random()
    if kind < 0.55:
        return Image.new("RGB", size, colour), colour
    cells, most = (2, 22) if kind < 0.8 else (rng.randint(5, 24), 12)
    levels = bytes(level for _ in range(cells * cells) for level in _stirred(rng, colour, most))
    return Image.frombytes("RGB", (cells, cells), levels).resize(size, Image.Resampling.BILINEAR), colour


def _named_colour(rng: random.Random, ground: Colour, but: str = "") -> tuple[str, Colour]:
    """A colour that can be told from the background."""
    while True:
        name = rng.choice([name for name in COLOURS if name != but])
        colour = _colour(rng, name)
        if math.dist(colour, ground) >= _LEAST_CONTRAST:
            return name, colour


def _turned(points: list[Point], centre: Point, radius: float, degrees: float) -> list[Point]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(centre[0] + radius * (x * cos - y * sin), centre[1] + radius * (x * sin + y * cos)) for x, y in points]


def _corners(shape: str) -> list[Point]:
    """The corners of a shape within the circle around the origin of radius 1."""
    if shape == "square":
        return [(-0.72, -0.72), (0.72, -0.72), (0.72, 0.72), (-0.72, 0.72)]
    if shape == "triangle":
        return [(0, -0.95), (0.88, 0.65), (-0.88, 0.65)]
    if shape == "diamond":
        return [(0, -1), (0.72, 0), (0, 1), (-0.72, 0)]
    if shape == "cross":
        a, b = 0.28, 0.9
        return [
            (-a, -b),
            (a, -b),
            (a, -a),
            (b, -a),
            (b, a),
            (a, a),
            (a, b),
            (-a, b),
            (-a, a),
            (-b, a),
            (-b, -a),
            (-a, -a),
        ]
    angles = [math.pi * (number / 5 - 0.5) for number in range(10)]
    return [
        ((0.42 if number % 2 else 1) * math.cos(angle), (0.42 if number % 2 else 1) * math.sin(angle))
        for number, angle in enumerate(angles)
    ]


def draw_shape(
    image: Image.Image, shape: str, colour: Colour, centre: Point, radius: float, degrees: float = 0
) -> None:
    """Draw a filled shape that fills about the circle of `radius` around `centre`, turned by a few degrees."""
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        reach = 0.85 * radius
        draw.ellipse((centre[0] - reach, centre[1] - reach, centre[0] + reach, centre[1] + reach), fill=colour)
    else:
        draw.polygon(_turned(_corners(shape), centre, radius, degrees), fill=colour)


def _box(centre: Point, radius: float) -> tuple[float, float, float, float]:
    return centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius


def _within(rng: random.Random, size: tuple[int, int], radius: float) -> Point:
    return rng.uniform(radius, size[0] - radius), rng.uniform(radius, size[1] - radius)


def _turn(rng: random.Random) -> float:
    return rng.uniform(-8, 8) if rng.random() < 0.5 else 0.0


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _one_shape(rng: random.Random, image: Image.Image, ground: Colour, split: str) -> tuple[list[Part], str]:
    shape = rng.choice(SHAPES)
    name, colour = _named_colour(rng, ground)
    radius = rng.uniform(0.17, 0.46) * min(image.size)
    centre = _within(rng, image.size, radius)
    draw_shape(image, shape, colour, centre, radius, _turn(rng))
    return [Part(shape, _box(centre, radius), name)], f"I see {article(name)} {shape}."


def _two_shapes(rng: random.Random, image: Image.Image, ground: Colour, split: str) -> tuple[list[Part], str]:
    """Two that differ in both, of which one is clearly left of the other, or above it."""
    radii = [rng.uniform(0.14, 0.22) * min(image.size) for _ in range(2)]
    while True:
        centres = [_within(rng, image.size, radius) for radius in radii]
        across, down = (abs(centres[0][axis] - centres[1][axis]) for axis in range(2))
        if max(across, down) >= max(1.05 * sum(radii), 1.7 * min(across, down)):
            break
    axis = 0 if across > down else 1
    first = rng.choice(SHAPES)
    shapes = [first, rng.choice([shape for shape in SHAPES if shape != first])]
    name, colour = _named_colour(rng, ground)
    colours = [(name, colour), _named_colour(rng, ground, but=name)]
    parts = []
    order = sorted(range(2), key=lambda number: centres[number][axis])
    for shape, (name, colour), number in zip(shapes, colours, order, strict=True):
        draw_shape(image, shape, colour, centres[number], radii[number], _turn(rng))
        parts.append(Part(shape, _box(centres[number], radii[number]), name))
    first, second = (article(f"{part.colour} {part.what}") for part in parts)
    return parts, f"{first.capitalize()} is {('left of', 'above')[axis]} {second}."


@lru_cache(64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)  # Pillow's wheels have FreeType, and with it a font
    return font


def draw_text(
    image: Image.Image, text: str, colour: Colour, centre: Point, size: int, spacing: float = 0, stroke: int = 0
) -> list[Part]:
    """Draw characters in a row around `centre`, with `spacing` pixels more between them than the font has."""
    font = _font(size)
    draw = ImageDraw.Draw(image)
    widths = [font.getlength(character) for character in text]
    x = centre[0] - (sum(widths) + spacing * (len(text) - 1)) / 2
    base, height = centre[1] + 0.35 * size, 0.7 * size
    parts = []
    for character, width in zip(text, widths, strict=True):
        draw.text((x, base), character, fill=colour, font=font, anchor="ls", stroke_width=stroke)
        parts.append(Part(character, (x, base - height, x + width, base)))
        x += width + spacing
    return parts


def _text(rng: random.Random, image: Image.Image, ground: Colour, text: str) -> list[Part]:
    _, colour = _named_colour(rng, ground)
    width, height = image.size
    spacing = rng.uniform(0, 0.35) if rng.random() < 0.4 else 0.04  # in sizes of the font
    of_size_100 = _font(100).getlength(text) + 100 * spacing * (len(text) - 1)
    largest = min(0.92 * width / of_size_100 * 100, 0.8 * height)
    size = max(8, int(largest * rng.uniform(0.62, 1)))
    taken = of_size_100 * size / 100
    centre = (
        rng.uniform(taken / 2 + 0.03 * width, width - taken / 2 - 0.03 * width),
        rng.uniform(0.45 * size, height - 0.45 * size),
    )
    stroke = rng.randint(1, max(1, size // 24)) if rng.random() < 0.35 else 0
    return draw_text(image, text, colour, centre, size, spacing * size, stroke)


def _digits(rng: random.Random, image: Image.Image, ground: Colour, split: str) -> tuple[list[Part], str]:
    text = "".join(rng.choices(DIGITS, k=rng.choice((1, 2, 3, 3, 4))))
    return _text(rng, image, ground, text), f"I see the digit{'s' if len(text) > 1 else ''} {' '.join(text)}."


def _any_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_SHORT_WORDS)
    if kind < 0.75:
        return made_up_word(rng, 2, LONGEST).upper()
    return "".join(rng.choices(LETTERS, k=rng.randint(2, LONGEST)))


_SHORT_WORDS = tuple(word.upper() for word in WORDS if len(word) <= LONGEST)


def _word(rng: random.Random, image: Image.Image, ground: Colour, split: str) -> tuple[list[Part], str]:
    text = draw_in_split(lambda: _any_word(rng), split)
    return _text(rng, image, ground, text), f"It says {text}."


def _nothing(rng: random.Random, image: Image.Image, ground: Colour, split: str) -> tuple[list[Part], str]:
    """An empty picture, or one of a few thin lines."""
    draw = ImageDraw.Draw(image)
    for _ in range(rng.choice((0, 0, 2, 6))):
        draw.line((*_within(rng, image.size, 0), *_within(rng, image.size, 0)), fill=_named_colour(rng, ground)[1])
    return [], NOTHING


_Drawer = Callable[[random.Random, Image.Image, Colour, str], tuple[list[Part], str]]
_DRAWERS: dict[str, _Drawer] = {
    "one_shape": _one_shape,
    "two_shapes": _two_shapes,
    "digits": _digits,
    "word": _word,
    "nothing": _nothing,
}


def draw_picture(rng: random.Random, split: str, kinds: Sequence[str]) -> Picture:
    """Draw a picture of one of `kinds`; `split` is whose words it may have: see phrases.py."""
    kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
    side = rng.choice((112, 160, 224, 280))
    other = side if rng.random() < 0.6 else round(side * rng.uniform(0.6, 1))
    size = (side, other) if rng.random() < 0.65 else (other, side)
    image, ground = _ground(rng, size)
    parts, sentence = _DRAWERS[kind](rng, image, ground, split)
    return Picture(kind, image, tuple(parts), sentence)


def held_out_pictures(seed: int, per_kind: int, kinds: tuple[str, ...] = KINDS) -> list[Picture]:
    """Return pictures that training has not seen; words are of the part that it holds out."""
    return [
        draw_picture(random.Random(f"pictures held out {seed} {kind} {number}"), HELD_OUT, (kind,))
        for kind in kinds
        for number in range(per_kind)
    ]
