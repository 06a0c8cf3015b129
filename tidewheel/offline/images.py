"""Images and videos that a program gives: PIL's images, arrays, bytes of files, and paths."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.files.wording import reason
from tidewheel.engine.media.decode_settings import LEAST_FPS, MOST_FPS
from tidewheel.engine.media.media import MediaFiles

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_URL = re.compile(r"(data|https?|file):", re.IGNORECASE)
_USUAL_FPS = 1.0  # as in vLLM
_PART_FIELDS = {"image_pil": "image_pil", "image": "image"}
"""Types of parts of a conversation that have an image itself, and the field that it is in."""


def media_files(data: Mapping[str, Any], param: str) -> list[MediaFiles]:
    """The media of vLLM's `multi_modal_data` as the bytes of files. Raises InvalidRequestError for anything else."""
    for name, value in data.items():
        if (
            name not in ("image", "video")
            and value is not None
            and not (isinstance(value, Sequence) and not len(value))
        ):
            raise InvalidRequestError(f"{param}.{name} is not supported: prompts may have images and videos", param)
    given = data.get("image")
    images = given if isinstance(given, list | tuple) else [] if given is None else [given]
    files = [MediaFiles((image_file(image, f"{param}.image[{i}]"),)) for i, image in enumerate(images)]
    videos = [] if data.get("video") is None else _videos(data["video"])
    return files + [_video(video, f"{param}.video[{i}]") for i, video in enumerate(videos)]


def _videos(given: Any) -> Sequence[Any]:
    """One video, or several, as vLLM tells them apart: the frames of one are images, or an array of 4 dimensions."""
    is_array = isinstance(given, np.ndarray)
    if is_array and given.ndim == 5:
        return list(given)
    if is_array or not isinstance(given, list | tuple) or not given or _is_image(given[0]):
        return [given]
    return [given] if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping) else given


def _video(given: Any, param: str) -> MediaFiles:
    """The frames of a video, or the file of an animation. Behind a video, a mapping may say how many `fps` it has."""
    about: Any = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, about = given
    frames = list(given) if isinstance(given, list | tuple | np.ndarray) else [given]
    if not frames:
        raise InvalidRequestError(f"{param} has no frames", param)
    fps = about.get("fps", _USUAL_FPS)
    if type(fps) not in (int, float) or not LEAST_FPS <= fps <= MOST_FPS:
        raise InvalidRequestError(f"{param}: fps must be a number from {LEAST_FPS:g} to {MOST_FPS:g}", param)
    return MediaFiles(tuple(image_file(frame, f"{param}[{i}]") for i, frame in enumerate(frames)), "video", float(fps))


def _is_image(value: Any) -> bool:
    return (hasattr(value, "save") and hasattr(value, "convert")) or (isinstance(value, np.ndarray) and value.ndim == 3)


def image_file(image: Any, param: str) -> bytes:
    """An image as the bytes of a file: PIL's image or an array [height, width, 3] of 8 bits, which become a PNG, the
    bytes themselves, or a file's path.

    Raises InvalidRequestError for what is none of these.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{param}: {image} cannot be read: {reason(error)}", param) from None
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        from PIL import Image

        image = Image.fromarray(image)
    if hasattr(image, "save") and hasattr(image, "convert"):
        buffer = io.BytesIO()
        (image if image.mode in _PNG_MODES else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()
    raise InvalidRequestError(f"{param} must be an image of PIL, an array, the bytes of a file or a path", param)


def with_sent_images(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with parts such as {"type": "image_pil", "image_pil": image} as clients send them.

    Raises InvalidRequestError.
    """
    return [_sent(message, f"messages[{i}]") for i, message in enumerate(conversation)]


def _sent(message: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return message
    return {**message, "content": [_sent_part(part, f"{path}.content[{i}]") for i, part in enumerate(parts)]}


def _sent_part(part: Any, path: str) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "video" and isinstance(part.get("video"), list | tuple):
        frames = enumerate(part["video"])
        return {**part, "video": [_sent_frame(frame, f"{path}.video[{i}]") for i, frame in frames]}
    field = _PART_FIELDS.get(part.get("type", "")) if isinstance(part, Mapping) else None
    if field is None or part.get(field) is None:
        return part
    return {"type": "image_url", "image_url": {"url": _data_url(part[field], f"{path}.{field}")}}


def _sent_frame(frame: Any, path: str) -> str:
    return frame if isinstance(frame, str) and _URL.match(frame) else _data_url(frame, path)


def _data_url(image: Any, param: str) -> str:
    return f"data:image/any;base64,{base64.b64encode(image_file(image, param)).decode('ascii')}"
