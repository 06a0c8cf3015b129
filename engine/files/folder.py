"""The JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .reading import MAX_JSON_BYTES, is_there, read_file
from .wording import one_line


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES, max_parts: int | None = None) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ModelError, naming the file, if it cannot be read or is not that.

    It may have at most `max_parts` objects and lists, roughly: brackets in its strings count too.
    """
    value = _read(path, max_bytes, max_parts)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, but empty if there is no such file."""
    return read_json(path) if is_there(path) else {}


def read_json_array(path: Path) -> list[Any]:
    """A file that holds one JSON array. Raises as `read_json` does."""
    value = _read(path)
    if not isinstance(value, list):
        raise ModelError(f"{path} must hold a JSON array, not a {type(value).__name__}")
    return value


def _read(path: Path, max_bytes: int = MAX_JSON_BYTES, max_parts: int | None = None) -> object:
    text = read_file(path, max_bytes)
    if max_parts is not None and text.count(b"[") + text.count(b"{") > max_parts:
        raise ModelError(f"{path} has more than {max_parts} objects and lists")
    try:
        value: object = json.loads(text)
        if b"\\u" in text:  # half of a surrogate pair is valid JSON, but no library accepts it as text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {one_line(error)}") from error
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`. Raises ModelError if there is none, or it does not name the model's architecture."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    if not is_there(path):
        if is_there(folder / "params.json"):
            raise ModelError(
                f"{folder} has Mistral's params.json and no config.json: name a repository of the model with Hugging "
                "Face's config.json and safetensors, or convert it"
            )
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    config = read_json(path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelError(f"{path} does not name the model's class in architectures, as in ['LlamaForCausalLM']")
    return config
