"""The pixels of image files, by Pillow. The server never calls this: its decoders run in processes of their own."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from .decode_settings import MAX_FRAMES, DecodeSettings
from .errors import ImageError
from .formats import FORMATS, image_format
from .frames import Frames, sampled
from .media import MediaFiles
from .picture import Picture, strips_of

_MAX_S = 24 * 3600  # of a video, whose seconds some models count positions by
_SHORTEST_S, _USUAL_S = 0.02, 0.1  # browsers show a picture of an animation for so long if it is to be shown for less


def picture_of(data: bytes, settings: DecodeSettings) -> Picture:
    """The image in a file: upright, in RGB, the first picture.

    Its pixels are those of transformers' `convert_to_rgb(exif_transpose(image))`. Only gray values of 16 bits differ:
    there they are cut off at 255, which makes such images white, and here their upper 8 bits count, as for colors.

    Raises ImageError, and MemoryError. The size is checked before pixels are decoded, if `import_decoders` was called:
    otherwise Pillow has a limit of its own.
    """
    with _readable():
        image = _opened(data, settings.max_pixels)
        image.load()
        _turn_upright(image)
        return _rgb(image, settings.background)


def frames_of(sent: MediaFiles, settings: DecodeSettings) -> Frames:
    """The frames of a video that are taken: of an animation, or of a file for each of them, all of one size.

    Raises as `picture_of` does; so does the iterator of their pictures.
    """
    if len(sent.files) > 1:
        return _frames_of_files(sent, settings)
    (data,) = sent.files
    with _readable():
        image = _opened(data, settings.max_pixels)
        count = getattr(image, "n_frames", 1)
        if count > MAX_FRAMES:
            raise ImageError(f"it has {count} frames, and {MAX_FRAMES} are the most")
        shown = [_seconds_shown(image, index) for index in range(count)]
        if sum(shown) > _MAX_S:
            raise ImageError(f"it takes {sum(shown):.0f} s, and {_MAX_S} are the most")
    chosen = sampled(count, sum(shown), settings.fps, settings.max_frames)
    starts = np.concatenate([[0.0], np.cumsum(shown)])
    seconds = tuple(float(starts[index]) for index in chosen)
    return Frames(image.height, image.width, seconds, len(chosen) / sum(shown), _pictures(data, chosen, settings))


def _frames_of_files(sent: MediaFiles, settings: DecodeSettings) -> Frames:
    count = len(sent.files)
    chosen = [int(index) for index in np.linspace(0, count - 1, min(count, settings.max_frames)).round()]
    first = picture_of(sent.files[0], settings)

    def pictures() -> Iterator[Picture]:
        yield first
        for index in chosen[1:]:
            picture = picture_of(sent.files[index], settings)
            if picture.shape != first.shape:
                raise _other_size(index, picture.shape[1::-1], first.shape[1::-1])
            yield picture

    seconds = tuple(index / sent.fps for index in chosen)
    height, width = first.shape[:2]
    return Frames(height, width, seconds, len(chosen) / count * sent.fps, pictures())


def _seconds_shown(image: Image.Image, index: int) -> float:
    _show(image, index)  # WebP does not say it before
    seconds = float(image.info.get("duration", 0)) / 1000
    return seconds if seconds >= _SHORTEST_S else _USUAL_S


def _pictures(data: bytes, chosen: Sequence[int], settings: DecodeSettings) -> Iterator[Picture]:
    """Pictures of an animation. Each one may be a change of those before it, so all of these are decoded, too."""
    with _readable():
        image = _opened(data, settings.max_pixels)
        for index in range(chosen[-1] + 1):
            _show(image, index)
            if index in chosen:
                yield _rgb(image.copy(), settings.background)  # the next one takes its place


def _show(image: Image.Image, index: int) -> None:
    """Decode a picture of an animation. It may not be larger than the first one, whose size was checked."""
    size = image.size
    image.seek(index)
    if image.size != size:
        raise _other_size(index, image.size, size)
    image.load()


def _other_size(index: int, size: Sequence[int], first: Sequence[int]) -> ImageError:
    return ImageError(f"frame {index} has {size[0]} x {size[1]} pixels, and the first one {first[0]} x {first[1]}")


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # Pillow raises what it happens to meet: SyntaxError, struct.error, TypeError and more
        raise ImageError("the file is damaged or incomplete") from error


def import_decoders() -> None:
    """Import what Pillow otherwise imports with the first file of each format, and turn off its own warnings."""
    from PIL import MpoImagePlugin, TiffImagePlugin  # noqa: F401  (some JPEG files need them)

    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # `picture_of` has a limit of its own
    for name in FORMATS:
        with contextlib.suppress(KeyError, OSError, ImageError):  # Pillow was built without it
            sample = io.BytesIO()
            Image.new("RGB", (8, 8)).save(sample, name)
            picture_of(sample.getvalue(), DecodeSettings(64))


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


def _rgb(image: Image.Image, background: tuple[int, int, int]) -> Picture:
    """Strip by strip unless it is RGB: Pillow's copies of a whole image would take more time and memory."""
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return Picture(image)
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    for top, bottom in strips_of(height, width):
        pixels[top:bottom] = _rgb_strip(image.crop((0, top, width, bottom)), background)
    return Picture(pixels)


def _rgb_strip(image: Image.Image, background: tuple[int, int, int]) -> NDArray[np.uint8]:
    transparent = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        gray = np.asarray(image)
        upper = (gray >> 8).astype(np.uint8)
        colors = np.repeat(upper[..., None], 3, axis=2)
        if isinstance(transparent, int):
            colors[gray == transparent] = background
        return colors
    if "A" in image.getbands() or transparent is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    return np.asarray(image.convert("RGB"))
