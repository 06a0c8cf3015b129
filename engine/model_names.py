"""The name of a model in APIs, where nothing else says it."""

from __future__ import annotations

import re
from pathlib import Path

_CACHED = re.compile(r"models--(.+)")  # the folder of a repository in the hub's cache
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def short_name(model: str) -> str:
    """A hub id as it is, and a path's last part: the folder, or the file without .gguf and the number of its part.

    A folder of the hub's cache has its repository's name. "folder:Q4_K_M" keeps what is named behind the folder.
    """
    path, wanted = Path(model).expanduser(), ""
    if not _exists(path):
        folder, _, wanted = model.rpartition(":")
        path = Path(folder).expanduser()
        if not folder or not _exists(path):
            return model
    for parent in (path, *path.parents):
        if (cached := _CACHED.fullmatch(parent.name)) and path.is_dir():
            return cached[1].replace("--", "/") + (f":{wanted}" if wanted else "")
    name = path.name if path.name not in ("", "..") else path.resolve().name
    if path.is_file():
        name = name_of_file(name)
    return (name or model) + (f":{wanted}" if wanted else "")


def name_of_file(name: str) -> str:
    """A file's name without .gguf and the number of its part."""
    return _PART.sub("", re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
