"""Images that a program gives: PIL's, bytes of files, and paths."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.files.wording import reason

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_PART_FIELDS = {"image_pil": "image_pil", "image": "image"}
"""Types of parts of a conversation that have an image itself, and the field that it is in."""


def image_files(data: Mapping[str, Any], param: str) -> list[bytes]:
    """The images of vLLM's `multi_modal_data` as the bytes of files. Raises InvalidRequestError for anything else."""
    for name, value in data.items():
        if name != "image" and value is not None and not (isinstance(value, Sequence) and not len(value)):
            raise InvalidRequestError(f"{param}.{name} is not supported: prompts may have images", param)
    given = data.get("image")
    if given is None:
        return []
    images = given if isinstance(given, list | tuple) else [given]
    return [image_file(image, f"{param}.image[{i}]") for i, image in enumerate(images)]


def image_file(image: Any, param: str) -> bytes:
    """An image as the bytes of a file: PIL's image, which becomes a PNG, the bytes themselves, or a file's path.

    Raises InvalidRequestError for what is none of these.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"{param}: {image} cannot be read: {reason(error)}", param) from None
    if hasattr(image, "save") and hasattr(image, "convert"):
        buffer = io.BytesIO()
        (image if image.mode in _PNG_MODES else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()
    raise InvalidRequestError(f"{param} must be an image of PIL, the bytes of a file or a path", param)


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
    field = _PART_FIELDS.get(part.get("type", "")) if isinstance(part, Mapping) else None
    if field is None or part.get(field) is None:
        return part
    encoded = base64.b64encode(image_file(part[field], f"{path}.{field}")).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{encoded}"}}
