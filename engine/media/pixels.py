"""The pixels of image files, by Pillow. The server never calls this: its decoders run in processes of their own."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from .errors import ImageError
from .formats import FORMATS, image_format

_STRIP_PIXELS = 2**17


def pixels_of(data: bytes, max_pixels: int) -> NDArray[np.uint8]:
    """The pixels `[height, width, 3]` of a file: upright, in RGB, transparent ones on white, of the first picture.

    They are those of transformers' `convert_to_rgb(exif_transpose(image))`. Only gray values of 16 bits differ: there
    they are cut off at 255, which makes such images white, and here their upper 8 bits count, as for colors.

    Raises ImageError, and MemoryError. The size is checked before pixels are decoded, if `import_decoders` was called:
    otherwise Pillow has a limit of its own.
    """
    try:
        image = _opened(data, max_pixels)
        image.load()
        _turn_upright(image)
        return _rgb(image)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # Pillow raises what it happens to meet: SyntaxError, struct.error, TypeError and more
        raise ImageError("the file is damaged or incomplete") from error


def import_decoders() -> None:
    """Import what Pillow otherwise imports with the first file of each format, and turn off its own warnings."""
    from PIL import MpoImagePlugin, TiffImagePlugin  # noqa: F401  (some JPEG files need them)

    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # `pixels_of` has a limit of its own
    for name in FORMATS:
        with contextlib.suppress(KeyError, OSError, ImageError):  # Pillow was built without it
            sample = io.BytesIO()
            Image.new("RGB", (8, 8)).save(sample, name)
            pixels_of(sample.getvalue(), 64)


def _opened(data: bytes, max_pixels: int) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=[image_format(data)])
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(f"it has {width} x {height} pixels, and {max_pixels} are the most")
    return image


def _turn_upright(image: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # a camera's notes may be damaged in a file whose pixels are not
        return


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Strip by strip: Pillow's copies of a whole image would take more time and memory."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        pixels[top : top + rows] = _rgb_strip(strip)
    return pixels


def _rgb_strip(image: Image.Image) -> NDArray[np.uint8]:
    transparent = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        gray = np.asarray(image)
        upper = (gray >> 8).astype(np.uint8)
        if isinstance(transparent, int):
            upper[gray == transparent] = 255
        return np.repeat(upper[..., None], 3, axis=2)
    if "A" in image.getbands() or transparent is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.asarray(image.convert("RGB"))
