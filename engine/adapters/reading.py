"""An adapter of any kind, by its path."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import ModelError
from ..files.reading import is_there, require_file
from ..files.wording import shown
from ..models.description import ModelDescription
from ..weights.checkpoint import shapes_in
from ..weights.gguf.reader import read_gguf_copy
from ..weights.lora import LoraAdapter
from ..weights.tensor import WeightSource
from .gguf_file import read_gguf_adapter
from .long_context import LongContexts
from .peft_config import CONFIG
from .peft_folder import adapter_file, max_tensors, read_peft_folder, require_folder

# GGUF files of these have multipliers in the weights which checkpoints have in the config.
_MULTIPLIED = ("FalconH1ForCausalLM",)
_MAX_NAMED = 10
# What checkpoints call experts: most families', Granite's, and all of GGUF's.
_OF_EXPERTS = re.compile(r"\.experts\.|\.block_sparse_moe\.(?:in|out)put_linear\.|_exps\.")


def read_adapter(
    path: Path,
    description: ModelDescription,
    max_rank: int,
    *,
    base: WeightSource | None = None,
    base_is_gguf: bool = False,
    contexts: LongContexts | None = None,
) -> LoraAdapter:
    """The adapter in a GGUF file, in a folder with one, or in a folder that peft has saved.

    Raises ModelError for one that is broken, not of this model, or of a rank above `max_rank`. `base` are the
    model's own weights; `base_is_gguf` says that they are in a GGUF file. `contexts` are how long adapters' may be.
    """
    file = _gguf_in(path)
    if description.architecture in _MULTIPLIED and base_is_gguf != (file is not None):
        raise ModelError(
            f"{path}: adapters of a {description.architecture} need a model in their own form, because GGUF files have "
            "its multipliers in the weights: give a GGUF adapter for a GGUF model, and peft's for another"
        )
    if file is not None:
        return read_gguf_adapter(file, description, max_rank)
    return read_peft_folder(path, description, max_rank, base, contexts)


def stored_bytes(path: Path, most: int) -> int:
    """The size of the file with an adapter's tensors. Raises ModelError if it has more than `most` bytes, or there is
    none.
    """
    file = _file(path)
    size = require_file(file)
    if size > most:
        raise ModelError(f"{file} has {size} bytes, more than the {most} that an adapter of this model can have")
    return size


def packed_bytes(path: Path, description: ModelDescription, itemsize: int) -> int:
    """About what an adapter takes in memory, with `itemsize` bytes for a number. Raises ModelError for one that cannot
    be read.
    """
    return itemsize * sum(size for _, size in _sizes(path, description))


def load_bytes(path: Path, description: ModelDescription, itemsize: int, copies: int) -> int:
    """About what an adapter takes while it is loaded: `packed_bytes`, and `copies` times what is read. That is the
    file, and A and B as float32. Raises ModelError for one that cannot be read.
    """
    total, read = 0, _file(path).stat().st_size
    for name, size in _sizes(path, description):
        total += size
        read += 4 * size if ".lora_" in name else 0
    return itemsize * total + copies * read


def changes_experts(path: Path, description: ModelDescription) -> bool:
    """Whether an adapter names matrices of routed experts. Raises ModelError for one that cannot be read."""
    return any(_OF_EXPERTS.search(name) for name, _ in _sizes(path, description))


def _sizes(path: Path, description: ModelDescription) -> Iterator[tuple[str, int]]:
    """The names of all tensors, and how many numbers each has. Raises ModelError."""
    file = _gguf_in(path)
    if file is None:
        shapes = shapes_in(_file(path), max_tensors(description))
    else:
        shapes = ((name, tensor.shape) for name, tensor in read_gguf_copy(file).tensors.items())
    return ((name, math.prod(shape)) for name, shape in shapes)


def _file(path: Path) -> Path:
    """The file with the adapter's tensors. Raises ModelError if there is none."""
    file = _gguf_in(path)
    if file is None:
        require_folder(path)
        file = adapter_file(path)
    return file


def _gguf_in(path: Path) -> Path | None:
    """The GGUF file that `path` is or has; None for a folder of peft, and for nothing."""
    if not os.path.isdir(path):  # unlike `is_dir`, of names that are too long too
        return path if path.suffix == ".gguf" else None
    if is_there(path / CONFIG):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(shown(file.name) for file in files[:_MAX_NAMED])
        raise ModelError(f"{path} has several GGUF files ({names}): give the path of one")
    return files[0] if files else None
