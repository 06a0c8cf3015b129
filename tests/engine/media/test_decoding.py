"""Decoding images in processes: whatever one does to its process, it alone is refused, and the next one works."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optional_packages import require_packages

require_packages("PIL")

from engine.media.pictures import colors, png, png_of, saved, zeros  # noqa: E402
from engine.media.tiny_vision import TinyVision  # noqa: E402
from waiting import wait_until  # noqa: E402

from engine.media import tiny_vision  # noqa: E402
from tidewheel.engine.cancellation import Cancellation, LoadCancelledError  # noqa: E402
from tidewheel.engine.media import decoding  # noqa: E402
from tidewheel.engine.media.decode_settings import DecodeSettings  # noqa: E402
from tidewheel.engine.media.decoding import ImageDecoder  # noqa: E402
from tidewheel.engine.media.decoding_process import COMMAND  # noqa: E402
from tidewheel.engine.media.errors import ImageError  # noqa: E402
from tidewheel.engine.media.media import Media, MediaFiles  # noqa: E402
from tidewheel.engine.sandboxing.sandbox import SandboxError  # noqa: E402

SETTINGS = DecodeSettings(2**22)
HAS_PROC = Path("/proc/self/task").is_dir()


@pytest.fixture(scope="module")
def shared() -> Iterator[ImageDecoder]:
    made = ImageDecoder(TinyVision(), SETTINGS)
    yield made
    made.close()


@pytest.fixture
def one() -> Iterator[ImageDecoder]:
    made = ImageDecoder(TinyVision(), SETTINGS)
    yield made
    made.close()


def decode(decoder: ImageDecoder, data: bytes) -> Media:
    return decoder.decode(MediaFiles((data,)), Cancellation())


def of_width(width: int) -> bytes:
    return png(width, 8)


def with_limits(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """The decoders of this test have other limits. Errors state the real ones."""
    changed = COMMAND.replace("main()", f"main.__globals__.update({limits}); main()")
    monkeypatch.setattr(decoding, "COMMAND", changed)


def decoders(command: str = COMMAND) -> set[int]:
    """The processes of this one that fork decoders."""
    mine = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and command.encode() in (process / "cmdline").read_bytes():
                mine.add(int(process.name))
    return mine


def descendants(leader: int) -> dict[int, int]:
    """The processes of a session that live, but its leader, and their parents."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found[int(process.name)] = int(parent)
    found.pop(leader, None)
    return found


def workers(leader: int) -> set[int]:
    """Those of them that decode. Their parents wait for them, and for a moment longer than they live."""
    return {process for process, parent in descendants(leader).items() if parent != leader}


def test_an_image_comes_back_as_the_model_takes_it(shared: ImageDecoder) -> None:
    image = colors(1200, 700)
    media = decode(shared, saved(image, "PNG"))
    pixels = np.asarray(image)
    assert (media.width, media.height, media.layout, media.num_tokens) == (1200, 700, (700, 1200), 1900)
    first, second = media.tiles
    np.testing.assert_array_equal(first, pixels)
    np.testing.assert_array_equal(second, pixels[:350, ::-1])
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0, 0] = 1


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "MPO"])
def test_every_format_is_decoded_where_no_file_can_be_opened(shared: ImageDecoder, name: str) -> None:
    more = {"save_all": True, "append_images": [colors(seed=1)]} if name == "MPO" else {}
    media = decode(shared, saved(colors(), name, **more))
    assert (media.width, media.height) == (37, 23)
    assert abs(media.tiles[0].astype(int) - np.asarray(colors())).mean() < 20


def test_the_digest_depends_on_pixels_shape_and_settings_alone(shared: ImageDecoder) -> None:
    def digest(data: bytes, decoder: ImageDecoder = shared) -> bytes:
        return decode(decoder, data).digest

    image = colors(40, 20)
    first = digest(saved(image, "PNG"))
    assert first == digest(saved(image, "BMP"))
    black = {digest(saved(image.resize(size).point(lambda _: 0), "PNG")) for size in [(40, 20), (20, 40), (80, 10)]}
    assert len({first, *black}) == 4
    other = ImageDecoder(TinyVision("other settings"), SETTINGS)
    assert digest(saved(image, "PNG"), other) != first
    other.close()


@pytest.mark.parametrize(
    ("width", "reason"),
    [
        (tiny_vision.ABORTS, "its decoder has failed"),
        (tiny_vision.LEAVES, "its decoder has failed"),
        (tiny_vision.GROWS, r"takes more than \d+ MiB of memory"),
        (tiny_vision.FAILS, "the model's image processor has failed"),
        (tiny_vision.OPENS, "the model's image processor has failed"),
        (tiny_vision.CONNECTS, "the model's image processor has failed"),
        (tiny_vision.REFUSES, "it has an unlucky width"),
    ],
)
def test_what_an_image_does_to_its_process_is_its_own_trouble(
    shared: ImageDecoder, width: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ImageError, match=reason):
        decode(shared, of_width(width))
    assert ("Traceback" in caplog.text) == ("processor" in reason)
    assert decode(shared, png()).width == 37


@pytest.mark.parametrize(
    ("width", "limit", "reason"),
    [
        (tiny_vision.SPINS, "MAX_CPU_S", "takes more than 10 s of processor time"),
        (tiny_vision.SLEEPS, "MAX_WALL_S", "takes longer than 60 s"),
    ],
)
def test_an_image_that_takes_too_long_is_refused(
    one: ImageDecoder, width: int, limit: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_limits(monkeypatch, **{limit: 1})
    with pytest.raises(ImageError, match=reason):
        decode(one, of_width(width))
    assert decode(one, png()).width == 37


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png_of(20_000, 20_000, zeros(20_000 * 60_001)), "20000 x 20000 pixels"),
        (saved(colors(20_000, 1), "PNG"), "a side of 20000 pixels is too long"),
        (b"%PDF-1.7", "a PDF file"),
        (png()[:-40], "damaged or incomplete"),
    ],
    ids=["bomb", "row", "pdf", "truncated"],
)
def test_what_is_no_image_for_the_model_is_refused(shared: ImageDecoder, data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode(shared, data)


def test_a_webp_bomb_is_refused(one: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow takes the memory of its pixels before it says how many these are."""
    with_limits(monkeypatch, _SPARE_BYTES=2**26)
    frame = saved(colors(9, 9), "WEBP", lossless=True)[12:]
    sizes = (16_383 - 1).to_bytes(3, "little") * 2
    chunks = b"VP8X" + (10).to_bytes(4, "little") + b"\x02\0\0\0" + sizes
    chunks += b"ANIM" + (6).to_bytes(4, "little") + bytes(6)
    chunks += b"ANMF" + (16 + len(frame)).to_bytes(4, "little") + bytes(6) + b"\x08\0\0" * 2 + bytes(4) + frame
    bomb = b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WEBP" + chunks
    with pytest.raises(ImageError, match=r"268402689|16383 x 16383|MiB of memory|damaged"):
        decode(one, bomb)
    assert decode(one, png()).width == 37


def test_one_pixel_is_an_image(shared: ImageDecoder) -> None:
    assert decode(shared, png(1, 1)).layout == (1, 1)


@pytest.mark.skipif(not HAS_PROC, reason="there is no /proc to see processes in")
def test_the_process_is_started_again_if_it_is_lost(one: ImageDecoder) -> None:
    before = decoders()
    decode(one, png())
    (process,) = decoders() - before
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # signals take a moment
    assert decode(one, png()).width == 37
    (other,) = decoders() - before - {process}
    assert other != process


@pytest.mark.skipif(not HAS_PROC, reason="there is no /proc to see processes in")
def test_a_decoder_that_is_killed_is_tried_once_more(one: ImageDecoder) -> None:
    """Its image is not at fault."""
    before = decoders()
    decode(one, png())
    (process,) = decoders() - before
    wait_until(lambda: not descendants(process))
    killed: set[int] = set()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decode, one, of_width(tiny_vision.SLEEPS))
        for _ in range(2):
            wait_until(lambda: workers(process) - killed)
            (worker,) = workers(process) - killed
            os.kill(worker, signal.SIGKILL)
            killed.add(worker)
        with pytest.raises(SandboxError, match=r"was killed.*try again later"):
            waiting.result()
    assert decode(one, png()).width == 37


@pytest.mark.skipif(not HAS_PROC, reason="there is no /proc to see processes in")
def test_a_decoder_ends_when_nobody_waits_for_it_any_more(one: ImageDecoder) -> None:
    before = decoders()
    decode(one, png())
    (process,) = decoders() - before
    cancellation = Cancellation()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.decode, MediaFiles((of_width(tiny_vision.SLEEPS),)), cancellation)
        wait_until(lambda: workers(process))
        cancellation.cancel()
        with pytest.raises(LoadCancelledError):
            waiting.result(timeout=5)
        wait_until(lambda: not descendants(process))


def test_closing_ends_what_is_being_decoded(one: ImageDecoder) -> None:
    decode(one, png())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decode, one, of_width(tiny_vision.SLEEPS))
        time.sleep(0.3)
        one.close()
        with pytest.raises(SandboxError, match="shutting down"):
            waiting.result(timeout=5)


def test_several_threads_decode_at_once(shared: ImageDecoder) -> None:
    started = threading.Barrier(4)

    def decoded(seed: int) -> Any:
        started.wait()
        return decode(shared, png(300, 200, seed=seed)).tiles[0]

    with ThreadPoolExecutor(4) as pool:
        for seed, tile in enumerate(pool.map(decoded, range(4))):
            np.testing.assert_array_equal(tile, np.asarray(colors(300, 200, seed=seed)))


def test_without_pillow_images_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "find_spec", lambda name: None)
    decoder = ImageDecoder(TinyVision(), SETTINGS)
    with pytest.raises(ImageError, match=r"no Pillow.*pip install pillow"):
        decoder.require(MediaFiles((png(),)))
