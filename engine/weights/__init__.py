"""Weights: from a model's name to its source, and from the source to tensors under Tidewheel's names."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from ..files.folder import read_config
from .checkpoint import open_weights
from .dummy import DummySource
from .folder_source import FolderSource
from .hub import resolve
from .source import ModelSource

__all__ = ["LOAD_FORMATS", "ModelSource", "open_source", "open_weights", "read_config", "resolve"]

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def open_source(
    model: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> ModelSource:
    """The model of that name: a folder or a hub id ("owner/name"), downloaded if need be.

    `load_format` is one of LOAD_FORMATS: auto and safetensors read the checkpoint, dummy makes random weights from
    `seed` and needs no weight files. Raises ModelError if there is no such model or format.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    source = FolderSource(resolve(model, revision, download_dir, with_weights=not dummy))
    return DummySource(source, seed) if dummy else source
