"""The drawn pictures: the same from the same seed, true to their sentences, and with held-out words of their own."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))  # the scripts are not part of the installed package

from demo_model.phrases import HELD_OUT, TRAIN
from demo_model.pictures import COLOURS, KINDS, draw_picture, held_out_pictures


def near(colour: tuple[int, ...], name: str) -> bool:
    ends = COLOURS[name]
    return all(min(a, b) - 9 <= level <= max(a, b) + 9 for level, a, b in zip(colour, *ends, strict=True))


def test_same_seed_same_picture() -> None:
    for kind in KINDS:
        one, again, other = (draw_picture(random.Random(seed), TRAIN, (kind,)) for seed in (3, 3, 4))
        assert (one.image.tobytes(), one.parts, one.sentence) == (again.image.tobytes(), again.parts, again.sentence)
        assert one.image.tobytes() != other.image.tobytes()


def test_sentences_say_what_was_drawn() -> None:
    for picture in held_out_pictures(1, 40):
        if picture.kind in ("one_shape", "two_shapes"):
            assert [f"{part.colour} {part.what}" in picture.sentence for part in picture.parts] == (
                [True] * len(picture.parts)
            )
            for part in picture.parts:
                left, top, right, bottom = part.box
                middle = picture.image.getpixel((int((left + right) / 2), int((top + bottom) / 2)))
                assert isinstance(middle, tuple)
                assert near(middle, part.colour)
        elif picture.kind != "nothing":
            said = "".join(part.what for part in picture.parts)
            assert said == picture.sentence.removeprefix("It says ").removeprefix("I see the digit").strip(
                "s. "
            ).replace(" ", "")
        if picture.kind == "two_shapes":
            first, second = (part.box for part in picture.parts)
            assert first[2] <= second[0] if "left of" in picture.sentence else first[3] <= second[1]
        for left, top, right, bottom in (part.box for part in picture.parts):
            assert -1 <= left < right <= picture.image.width + 1
            assert -1 <= top < bottom <= picture.image.height + 1


def test_held_out_words_are_not_trained() -> None:
    words = [
        {draw_picture(random.Random(seed), split, ("word",)).sentence for seed in range(150)}
        for split in (TRAIN, HELD_OUT)
    ]
    assert not words[0] & words[1]
