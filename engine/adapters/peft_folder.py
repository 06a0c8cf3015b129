"""A folder that peft saved an adapter to, as a LoraAdapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from ..weights.lora import LoraAdapter, LowRankUpdate
from ..weights.stored import FLOATS, Checkpoint, StoredTensor
from ..weights.tensor import DenseTensor, to_float32
from .modules import adaptable_modules
from .peft_config import PeftConfig, read_peft_config

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
    reader = _Reader(path, config, description, max_rank)
    by_module = reader.by_module(open_file(path))
    if not by_module:
        raise ModelError(f"{path} has no tensors")
    return LoraAdapter(tuple(update for name, parts in by_module.items() for update in reader.updates(name, parts)))


class _Reader:
    def __init__(self, path: Path, config: PeftConfig, description: ModelDescription, max_rank: int) -> None:
        self._path = path
        self._config = config
        self._description = description
        self._modules = adaptable_modules(description)
        self._max_rank = max_rank

    def by_module(self, checkpoint: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
        """The tensors of each module, by what is behind its name."""
        found: dict[str, dict[str, StoredTensor]] = {}
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
            found.setdefault(module, {})[match[2]] = stored
        return found

    def _module(self, name: str) -> str | None:
        """What the family calls a module. It may be named as in a model that takes images too."""
        prefix = self._description.base_prefix
        alone = text_name(f"{name}.weight", self._description) if self._description.text_part else None
        candidates = (name, prefix + name, (alone or "").removesuffix(".weight"))
        return next((module for module in candidates if module in self._modules), None)

    def updates(self, module: str, parts: Mapping[str, StoredTensor]) -> list[LowRankUpdate]:
        """What the tensors of a module change."""
        targets = self._modules[module]
        try:
            stored_a, stored_b = parts["lora_A.weight"], parts["lora_B.weight"]
        except KeyError as missing:
            raise ModelError(f"{self._path}: {module} has no {missing.args[0]}") from None
        inputs = targets[0].inputs
        rank = stored_a.shape[0] if len(stored_a.shape) == 2 else 0
        fits = len(stored_b.shape) == 2 and all(target.fits(stored_b.shape) for target in targets)
        if not rank or stored_a.shape[1] != inputs or not fits or stored_b.shape[1] != rank:
            raise ModelError(
                f"{self._path}: {module} has A {stored_a.shape} and B {stored_b.shape}, which do not fit the model: it "
                f"needs A (rank, {inputs}) and B (outputs, rank) with all outputs of that layer"
            )
        if rank > self._max_rank:
            raise ModelError(
                f"{self._path}: {module} has rank {rank}, more than --max-lora-rank {self._max_rank}; raise that option"
            )
        a, b = self._floats(f"{module}.lora_A", stored_a), self._floats(f"{module}.lora_B", stored_b)
        bias = None
        if "lora_B.bias" in parts:
            if parts["lora_B.bias"].shape != stored_b.shape[:1]:
                raise ModelError(f"{self._path}: the bias of {module} has shape {parts['lora_B.bias'].shape}")
            bias = self._floats(f"{module}.lora_B.bias", parts["lora_B.bias"])
        scale = self._config.scale(module, rank)
        return [
            LowRankUpdate(
                target.name, a, target.rows(b), scale, None if bias is None else target.rows(bias), target.first_output
            )
            for target in targets
        ]

    def _floats(self, name: str, stored: StoredTensor) -> NDArray[np.float32]:
        dtype = FLOATS.get(stored.dtype)
        if dtype is None:
            raise ModelError(f"{self._path}: {name} is stored as {stored.dtype}; supported are {', '.join(FLOATS)}")
        values = to_float32(DenseTensor(stored.array(STORAGE[dtype].newbyteorder("<"))[0], dtype))
        if not np.isfinite(values).all():
            raise ModelError(f"{self._path}: {name} has values that are not finite")
        return values
