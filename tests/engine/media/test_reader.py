"""MediaReader: images are read in order and once, and stand in prompts where their placeholders were."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optional_packages import require_packages

require_packages("PIL")

from engine.media.pictures import colors, png, saved  # noqa: E402
from engine.media.tiny_vision import SLEEPS, TinyVision  # noqa: E402

from tidewheel.engine.errors import BusyError, InvalidRequestError  # noqa: E402
from tidewheel.engine.media import reader as reader_module  # noqa: E402
from tidewheel.engine.media.media import Media, MediaFiles, MediaSpan, Modality  # noqa: E402
from tidewheel.engine.media.reader import MediaReader  # noqa: E402

SLOT = 7
SLOTS: dict[Modality, int] = {"image": SLOT}
WHERE = "messages[0].content[1]"


@pytest.fixture(scope="module")
def keeping() -> Iterator[MediaReader]:
    made = MediaReader(TinyVision(), SLOTS, cache_bytes=200_000)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    made = MediaReader(TinyVision(), SLOTS, max_bytes=50_000, max_decodes=1)
    yield made
    made.close()


def read(reader: MediaReader, data: bytes) -> Media:
    return asyncio.run(reader.read(MediaFiles((data,)), WHERE))


def test_an_image_is_read(reader: MediaReader) -> None:
    media = read(reader, png())
    np.testing.assert_array_equal(media.tiles[0], np.asarray(colors()))
    assert reader.marks == {"image": ("<image>", "<pad>")}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"%PDF-1.7", "cannot be read as an image: it is a PDF file; images may be JPEG"),
        (png()[:-40], "cannot be read as an image: the file is damaged or incomplete"),
        (saved(colors(2001, 1), "PNG"), "cannot be read as an image: a side of 2001 pixels is too long"),
        (png() + bytes(50_000), r"is an image of \d+ bytes; 50000 are the most"),
    ],
)
def test_errors_name_the_field_of_the_request(reader: MediaReader, data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        read(reader, data)
    assert str(refused.value).startswith(WHERE)
    assert refused.value.param == WHERE


def test_a_picture_is_recalled_by_its_name_while_it_is_kept(keeping: MediaReader, reader: MediaReader) -> None:
    async def named(reader: MediaReader, seed: int, name: str) -> Media:
        return await reader.read(MediaFiles((png(seed=seed),)), WHERE, name=name)

    for seed in (3, 4):  # the second time, the name stands for another picture
        media = asyncio.run(named(keeping, seed, "one"))
        assert keeping.recall("one", "image") is media
    assert keeping.recall("two", "image") is None
    assert keeping.recall("one", "video") is None
    asyncio.run(named(reader, 3, "one"))
    assert reader.recall("one", "image") is None  # it keeps none


def test_a_picture_that_is_sent_again_is_not_decoded_again(keeping: MediaReader, reader: MediaReader) -> None:
    assert read(keeping, png(seed=1)) is read(keeping, png(seed=1))
    assert read(keeping, png(seed=1)) is not read(keeping, png(seed=2))
    first = read(reader, png(seed=1))  # it keeps none
    second = read(reader, png(seed=1))
    assert first is not second
    assert first.digest == second.digest


def test_the_pictures_that_are_kept_are_those_used_last(keeping: MediaReader) -> None:
    files = [png(200, 100, seed=i) for i in range(4)]  # 90,000 bytes of pixels each: two have room
    first, second = read(keeping, files[0]), read(keeping, files[1])
    assert read(keeping, files[0]) is first
    read(keeping, files[2])
    assert read(keeping, files[0]) is first
    assert read(keeping, files[1]) is not second


def test_a_picture_that_is_larger_than_the_cache_is_not_kept(keeping: MediaReader) -> None:
    small, large = png(seed=5), png(500, 400)
    kept = read(keeping, small)
    assert read(keeping, large) is not read(keeping, large)
    assert read(keeping, small) is kept


def test_images_wait_in_the_order_of_coming(reader: MediaReader) -> None:
    """Even if later ones would take less time."""

    async def crowd() -> list[int]:
        done: list[int] = []

        async def one(i: int) -> None:
            await reader.read(MediaFiles((png(500 - 100 * i, 100 - i),)), WHERE)
            done.append(i)

        await asyncio.gather(*map(one, range(5)))
        return done

    assert asyncio.run(crowd()) == [0, 1, 2, 3, 4]


def test_only_so_much_may_wait(reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_WAITING_BYTES", 3 * 2**16)

    async def crowd() -> list[Any]:
        return await asyncio.gather(
            *(reader.read(MediaFiles((png(seed=i),)), WHERE) for i in range(5)), return_exceptions=True
        )

    results = asyncio.run(crowd())
    assert [type(result) for result in results] == [Media] * 3 + [BusyError] * 2
    assert isinstance(read(reader, png()), Media), "the others wait no more"


def test_who_goes_leaves_the_place_to_the_next(reader: MediaReader) -> None:
    async def crowd() -> None:
        gone = [asyncio.create_task(reader.read(MediaFiles((png(SLEEPS, 8 + i),)), WHERE)) for i in range(3)]
        stays = asyncio.create_task(reader.read(MediaFiles((png(),)), WHERE))
        await asyncio.sleep(0.5)
        for task in gone:
            task.cancel()
        assert isinstance(await asyncio.wait_for(stays, 20), Media)
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*gone, return_exceptions=True)
        )

    asyncio.run(crowd())


def test_closing_ends_those_who_wait() -> None:
    async def crowd() -> list[Any]:
        reader = MediaReader(TinyVision(), SLOTS, max_decodes=1)
        await reader.read(MediaFiles((png(),)), WHERE)
        waiting = [asyncio.create_task(reader.read(MediaFiles((png(SLEEPS, 8 + i),)), WHERE)) for i in range(3)]
        await asyncio.sleep(0.5)
        reader.close()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)

    assert [type(result) for result in asyncio.run(crowd())] == [BusyError] * 3


def test_the_server_never_imports_pillow() -> None:
    """Whose imports take time and which is not there on every machine. Its decoders import it."""
    code = "import sys, tidewheel.engine.media.reader, tidewheel.engine.media.fetching; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def made(height: int, width: int) -> Media:
    return Media((), (height, width), height + width, bytes([height, width]), width, height)


FIRST, SECOND = made(2, 3), made(1, 2)


def tokens(text: str) -> list[int]:
    """A token for each character, and one for each slot."""
    return [SLOT if piece == "\0" else 100 + ord(piece) for piece in text.replace("<pad>", "\0")]


def test_slots_take_the_places_of_placeholders(reader: MediaReader) -> None:
    expanded = reader.expand("a<image>b<image>", [FIRST, SECOND], WHERE)
    assert expanded.text == "a[<pad>|<pad>]b[<pad>|<pad>]"
    ids, spans = reader.spread(tokens(expanded.text), expanded)
    assert ids == tokens("a[<pad><pad>|<pad><pad><pad>]b[<pad>|<pad><pad>]")
    assert spans == (
        MediaSpan(FIRST, 2, 2, 0), MediaSpan(FIRST, 5, 3, 2), MediaSpan(SECOND, 11, 1, 0), MediaSpan(SECOND, 13, 2, 1),
    )  # fmt: skip
    assert len(ids) - len(tokens(expanded.text)) == expanded.num_added_tokens


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_every_embedding_has_its_token(reader: MediaReader, images: list[tuple[str, int, int]]) -> None:
    media = [made(height, width) for _, height, width in images]
    expanded = reader.expand("".join(f"{before}<image>" for before, _, _ in images) + "c", media, WHERE)
    ids, spans = reader.spread(tokens(expanded.text), expanded)
    wanted = "".join(f"{before}[{'<pad>' * height}|{'<pad>' * width}]" for before, height, width in images)
    assert ids == tokens(wanted + "c")
    covered = [(span.media, span.first_row + i, span.start + i) for span in spans for i in range(span.length)]
    assert [at for *_, at in covered] == [at for at, token in enumerate(ids) if token == SLOT]
    rows = [(id(image), row) for image in media for row in range(image.num_tokens)]
    assert [(id(image), row) for image, row, _ in covered] == rows


def test_a_text_without_images_stays_as_it_is(reader: MediaReader) -> None:
    expanded = reader.expand("abc", [], WHERE)
    assert expanded.text == "abc"
    assert reader.spread([1, 2, 3], expanded) == ([1, 2, 3], ())


@pytest.mark.parametrize("media", [[], [FIRST]])
@pytest.mark.parametrize("text", ["<image> <image>", "<image>" * 100_000])
def test_a_text_with_the_models_own_marker_is_refused(reader: MediaReader, text: str, media: list[Media]) -> None:
    with pytest.raises(InvalidRequestError, match="contains '<image>' besides its images: the model's own") as refused:
        reader.expand(text, media, WHERE)
    assert refused.value.param == WHERE


def test_images_that_the_template_leaves_out_are_an_error(reader: MediaReader) -> None:
    with pytest.raises(InvalidRequestError, match="has 2 images, of which the model's chat template shows 1"):
        reader.expand("a<image>", [FIRST, SECOND], WHERE)


def test_a_text_with_slots_of_its_own_is_refused(reader: MediaReader) -> None:
    expanded = reader.expand("<pad><image>", [FIRST], WHERE)
    with pytest.raises(InvalidRequestError, match="contains '<pad>' besides its images") as refused:
        reader.spread(tokens(expanded.text), expanded)
    assert refused.value.param == WHERE


def test_token_ids_with_slots_and_no_images_are_refused(reader: MediaReader) -> None:
    expanded = reader.expand("", [], "prompt")
    with pytest.raises(InvalidRequestError, match="prompt contains '<pad>'"):
        reader.spread([1, SLOT, 2], expanded)


def test_a_hundred_thousand_images_take_linear_time(reader: MediaReader) -> None:
    """Anything slower would take longer than the test may."""
    expanded = reader.expand("a<image>" * 100_000, [FIRST] * 100_000, WHERE)
    ids, spans = reader.spread(tokens(expanded.text), expanded)
    assert len(spans) == 200_000
    assert ids.count(SLOT) == 500_000
