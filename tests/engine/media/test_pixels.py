"""The pixels of a file: those that transformers sees in it, upright, in RGB, on white."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from optional_packages import require_packages

require_packages("PIL", "transformers")

from engine.media.pictures import colors, png, png_chunk, png_of, saved, zeros  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402
from transformers.image_transforms import convert_to_rgb  # noqa: E402
from transformers.image_utils import load_image  # noqa: E402

from tidewheel.engine.media.decode_settings import DecodeSettings  # noqa: E402
from tidewheel.engine.media.errors import ImageError  # noqa: E402
from tidewheel.engine.media.picture import Picture  # noqa: E402
from tidewheel.engine.media.pixels import import_decoders, picture_of  # noqa: E402

MAX_PIXELS = 2**20
SETTINGS = DecodeSettings(MAX_PIXELS)
RGB = colors()
CLEAR = colors(channels=4)
OPAQUE = {
    "JPEG": saved(RGB, "JPEG", quality=80),
    "progressive JPEG": saved(RGB, "JPEG", progressive=True),
    "gray JPEG": saved(RGB.convert("L"), "JPEG"),
    "CMYK JPEG": saved(RGB.convert("CMYK"), "JPEG"),
    "two pictures in a JPEG": saved(RGB, "MPO", save_all=True, append_images=[colors(seed=1)]),
    "PNG": saved(RGB, "PNG"),
    "gray PNG": saved(RGB.convert("L"), "PNG"),
    "1-bit PNG": saved(RGB.convert("1"), "PNG"),
    "palette PNG": saved(RGB.quantize(9), "PNG"),
    "GIF": saved(RGB, "GIF"),
    "moving GIF": saved(RGB, "GIF", save_all=True, append_images=[colors(seed=1), colors(seed=2)]),
    "WebP": saved(RGB, "WEBP", quality=70),
    "lossless WebP": saved(RGB, "WEBP", lossless=True),
    "moving WebP": saved(RGB, "WEBP", save_all=True, append_images=[colors(seed=1)]),
    "BMP": saved(RGB, "BMP"),
    "palette BMP": saved(RGB.quantize(9), "BMP"),
    "one pixel": saved(RGB.crop((0, 0, 1, 1)), "PNG"),
    "one row": saved(colors(MAX_PIXELS, 1), "PNG"),
    "one column": saved(colors(1, MAX_PIXELS), "PNG"),
    "wide": saved(colors(1000, 300), "JPEG"),
}
TRANSPARENT = {
    "RGBA PNG": saved(CLEAR, "PNG"),
    "gray and alpha PNG": saved(CLEAR.convert("LA"), "PNG"),
    "a transparent color": saved(RGB, "PNG", transparency=RGB.getpixel((3, 4))),
    "a transparent gray": saved(RGB.convert("L"), "PNG", transparency=RGB.convert("L").getpixel((3, 4))),
    "a transparent bit": saved(RGB.convert("1"), "PNG", transparency=0),
    "a palette with alpha": saved(RGB.quantize(9), "PNG", transparency=bytes(range(0, 252, 28))),
    "a palette with a transparent color": saved(RGB.quantize(9), "PNG", transparency=2),
    "GIF with a transparent color": saved(RGB.quantize(9), "GIF", transparency=2),
    "WebP with alpha": saved(CLEAR, "WEBP", lossless=True),
    "wide": saved(colors(1000, 300, channels=4), "PNG"),
}


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # puts it back
    import_decoders()


def pixels_of(data: bytes, settings: DecodeSettings) -> NDArray[np.uint8]:
    return picture_of(data, settings).pixels


def seen_by_transformers(data: bytes) -> NDArray[Any]:
    image = Image.open(io.BytesIO(data))
    return convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True)


@pytest.mark.parametrize("kind", OPAQUE)
def test_files_have_the_pixels_that_transformers_loads(kind: str) -> None:
    pixels = pixels_of(OPAQUE[kind], SETTINGS)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.asarray(load_image(Image.open(io.BytesIO(OPAQUE[kind])))))
    np.testing.assert_array_equal(pixels, seen_by_transformers(OPAQUE[kind]))


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_what_is_transparent_is_on_white(kind: str) -> None:
    pixels = pixels_of(TRANSPARENT[kind], SETTINGS)
    np.testing.assert_array_equal(pixels, seen_by_transformers(TRANSPARENT[kind]))
    assert (pixels != np.asarray(Image.open(io.BytesIO(TRANSPARENT[kind])).convert("RGB"))).any()


def test_clear_pixels_are_white() -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (pixels_of(saved(image, "PNG"), DecodeSettings(16)) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_photos_are_turned_upright(name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    data = saved(RGB, name, exif=exif)
    pixels = pixels_of(data, SETTINGS)
    assert pixels.shape == ((37, 23, 3) if orientation > 4 else (23, 37, 3))
    np.testing.assert_array_equal(pixels, np.asarray(load_image(Image.open(io.BytesIO(data)))))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 200_000), (200_000, 1), (700, 400), (513, 256)])
def test_strips_are_all_pixels_in_their_order(width: int, height: int) -> None:
    image = colors(width, height)
    for picture in (Picture(image), Picture(np.asarray(image)), Picture(np.asarray(image)[:, ::-1])):
        pixels = b"".join(picture.strips())
        assert pixels == picture.pixels.tobytes() == picture.image.tobytes()
    assert Picture(image).shape == Picture(np.asarray(image)).shape == (height, width, 3)


def test_damaged_notes_of_a_camera_do_not_count() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    data = saved(RGB, "JPEG", exif=exif)
    at = data.index(b"Exif\0\0") + 10
    damaged = data[:at] + b"\xff" * 8 + data[at + 8 :]
    np.testing.assert_array_equal(pixels_of(damaged, SETTINGS), pixels_of(saved(RGB, "JPEG"), SETTINGS))


def test_gray_of_16_bits_is_not_cut_off_as_white() -> None:
    values = np.linspace(0, 65535, 23 * 37, dtype=np.uint16).reshape(23, 37)
    pixels = pixels_of(saved(Image.fromarray(values), "PNG"), SETTINGS)
    np.testing.assert_array_equal(pixels, np.repeat((values >> 8)[..., None], 3, axis=2))


def test_a_transparent_gray_of_16_bits_is_white() -> None:
    values = np.full((4, 4), 0x1234, np.uint16)
    values[1, 2] = 0x1235
    data = saved(Image.fromarray(values), "PNG")
    at = data.index(b"IDAT") - 4
    data = data[:at] + png_chunk(b"tRNS", b"\x12\x35") + data[at:]
    pixels = pixels_of(data, SETTINGS)
    assert (pixels[1, 2] == 255).all()
    assert (pixels[0] == 0x12).all()


@pytest.mark.parametrize("kind", [kind for kind in OPAQUE if kind not in ("one pixel", "one row", "one column")])
def test_truncated_files_are_refused(kind: str) -> None:
    data = OPAQUE[kind]
    if kind.startswith(("moving", "two")):  # the first picture may be complete
        data = data[: len(data) // 4]
    with pytest.raises(ImageError, match="damaged or incomplete"):
        pixels_of(data[: len(data) // 2], SETTINGS)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b'\xef\xbb\xbf <?xml version="1.0"?><svg/>', "an SVG drawing"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"%PDF-1.7 ...", "a PDF file"),
        (saved(RGB, "TIFF"), "a TIFF image"),
        (saved(RGB, "ICO"), "an icon"),
        (saved(RGB, "JPEG2000"), "a JPEG 2000 image"),
        (b"\0\0\0\x1cftypavif", "an AVIF image"),
        (b"\0\0\0\x1cftypheic", "a HEIC image"),
        (b"\0\0\0\x1cftypisom", "a video"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"iVBORw0KGgoAAAANSUhEUg", "base64 of an image"),
        (saved(RGB, "PPM"), "of no known format"),
        (saved(RGB, "TGA"), "of no known format"),
        (b"hello", "of no known format"),
    ],
)
def test_other_files_are_refused_by_name(data: bytes, what: str) -> None:
    with pytest.raises(ImageError, match=what):
        pixels_of(data, SETTINGS)


def test_a_file_counts_as_what_it_begins_as() -> None:
    """What comes after an image is not looked at, and what has another beginning is not looked for."""
    polyglot = png() + b"%PDF-1.7" + saved(RGB, "TIFF")
    np.testing.assert_array_equal(pixels_of(polyglot, SETTINGS), np.asarray(RGB))
    with pytest.raises(ImageError, match="a PDF file"):
        pixels_of(b"%PDF-1.7\n" + png(), SETTINGS)


@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (1025, 1024), (1, 2**20 + 1), (2**31 - 1, 2**31 - 1)])
def test_large_sizes_are_refused_before_pixels_are_decoded(width: int, height: int) -> None:
    """The rows are not even there."""
    with pytest.raises(ImageError, match=f"it has {width} x {height} pixels, and 1048576 are the most"):
        pixels_of(png_of(width, height, b""), SETTINGS)


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ImageError):
        pixels_of(png_of(0, 5, zeros(5)), SETTINGS)
    with pytest.raises(ImageError):
        pixels_of(b"GIF89a" + bytes(7) + b";", SETTINGS)
