"""A folder that peft saved an adapter to, as a LoraAdapter."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.reading import is_there
from ..files.wording import shown
from ..models.description import ModelDescription
from ..models.text_part import text_name
from ..weights.checkpoint import open_file
from ..weights.dtypes import STORAGE
from ..weights.lora import LoraAdapter
from ..weights.stored import FLOATS, Checkpoint, StoredTensor
from ..weights.tensor import DenseTensor, to_float32
from .modules import adaptable_modules
from .peft_config import read_peft_config
from .updates import AdapterTensor, updates_of

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias)")


def read_peft_folder(folder: Path, description: ModelDescription, max_rank: int) -> LoraAdapter:
    """The adapter in `folder`. Raises ModelError for one that is broken, not of this model, or of a rank above
    `max_rank`.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    config = read_peft_config(folder)
    path = folder / WEIGHTS
    if not is_there(path):
        pickle = (
            f": {_PICKLE} is a pickle, which can run code and is never loaded" if is_there(folder / _PICKLE) else ""
        )
        raise ModelError(f"{folder} has no {WEIGHTS}{pickle}; save the adapter as safetensors")
    reader = _Reader(path, description)
    by_module = reader.by_module(open_file(path))
    if not by_module:
        raise ModelError(f"{path} has no tensors")
    updates = []
    for module, parts in by_module.items():
        for needed in ("lora_A.weight", "lora_B.weight"):
            if needed not in parts:
                raise ModelError(f"{path}: {module} has no {needed}")
        a, b, bias = parts["lora_A.weight"], parts["lora_B.weight"], parts.get("lora_B.bias")
        updates += updates_of(reader.modules[module], a, b, bias, partial(config.scale, module), max_rank)
    return LoraAdapter(tuple(updates))


class _Reader:
    def __init__(self, path: Path, description: ModelDescription) -> None:
        self._path = path
        self._description = description
        self.modules = adaptable_modules(description.spec, description.tensors)

    def by_module(self, checkpoint: Checkpoint) -> dict[str, dict[str, AdapterTensor]]:
        """The tensors of each module, by what is behind its name."""
        found: dict[str, dict[str, AdapterTensor]] = {}
        for name, stored in checkpoint.items():
            match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
            if match is None:
                raise ModelError(f"{self._path}: {shown(name)} is not an A or B of a LoRA adapter of linear layers")
            module = self._module(match[1])
            if module is None:
                raise ModelError(
                    f"{self._path}: {shown(match[1])} cannot be changed by an adapter here; linear layers of attention "
                    "and MLPs can, experts, embeddings and heads cannot"
                )
            label = f"{module}.{match[2]}"
            tensor = AdapterTensor(self._path, label, stored.shape, partial(_floats, label, stored))
            found.setdefault(module, {})[match[2]] = tensor
        return found

    def _module(self, name: str) -> str | None:
        """What the family calls a module. It may be named as in a model that takes images too."""
        prefix = self._description.base_prefix
        alone = text_name(f"{name}.weight", self._description) if self._description.text_part else None
        candidates = (name, prefix + name, (alone or "").removesuffix(".weight"))
        return next((module for module in candidates if module in self.modules), None)


def _floats(name: str, stored: StoredTensor) -> NDArray[np.float32]:
    dtype = FLOATS.get(stored.dtype)
    if dtype is None:
        raise ModelError(f"{stored.path}: {name} is stored as {stored.dtype}; supported are {', '.join(FLOATS)}")
    return to_float32(DenseTensor(stored.array(STORAGE[dtype].newbyteorder("<"))[0], dtype))
