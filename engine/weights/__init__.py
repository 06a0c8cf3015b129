"""Weights: from a model's name to its source, and from the source to tensors under Tidewheel's names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..files.folder import read_config
from ..files.reading import is_there
from .checkpoint import open_weights
from .dummy import DummySource
from .gguf.choosing import find_gguf
from .hub import resolve
from .source import ModelSource, StoredSource

if TYPE_CHECKING:
    from .folder_source import FolderSource
    from .gguf.source import GgufSource

__all__ = [
    "LOAD_FORMATS",
    "ModelSource",
    "StoredSource",
    "open_source",
    "open_weights",
    "read_config",
    "resolve",
    "source_at",
]

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


def open_source(
    model: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    load_format: str = "auto",
    seed: int = 0,
    *,
    with_mmproj: bool = False,
) -> ModelSource:
    """The model of that name: a `.gguf` file, a folder, or a hub id ("owner/name"), downloaded if need be.

    `load_format` is one of LOAD_FORMATS: auto reads what is there, safetensors, pt (PyTorch's) and gguf one kind of
    checkpoint, dummy makes random weights from `seed` and needs no weight files. `with_mmproj`: what lets a GGUF model
    of the hub see is downloaded, too. Raises ModelError if there is no such model or format.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    path = resolve(
        model, revision, download_dir, with_weights=not dummy, load_format=load_format, with_mmproj=with_mmproj
    )
    source = source_at(path, load_format)
    return DummySource(source, seed) if dummy else source


def source_at(path: Path, load_format: str) -> FolderSource | GgufSource:
    """The model in a folder or a `.gguf` file. Raises ModelError if it is not of that format."""
    if (load_format == "dummy" and is_there(path / "config.json")) or (load_format == "pt" and path.is_dir()):
        gguf = None
    else:
        gguf = find_gguf(path) if path.is_dir() else path
    if gguf is None and load_format == "gguf":
        raise ModelError(f"{path} has no GGUF file, or has safetensors too: --load-format gguf needs the path of one")
    # A start needs one of the two, and imports no more.
    if gguf is None:
        from .folder_source import FolderSource

        return FolderSource(path, load_format)
    if load_format in ("safetensors", "pt"):
        raise ModelError(f"{gguf} is a GGUF file, but --load-format is {load_format}")
    from .gguf.source import GgufSource

    return GgufSource(gguf)
