"""An adapter in a GGUF file, as llama.cpp's convert_lora_to_gguf writes it.

The format: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp. Its matrices have the names and the
order of rows that the model's have in GGUF files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import shown
from ..models.description import ModelDescription
from ..models.spec import tensor_shapes
from ..models.tensor_ref import TensorRef
from ..weights.gguf.architecture import GgufArchitecture
from ..weights.gguf.architectures import ARCHITECTURES, variants_of
from ..weights.gguf.fields import Fields
from ..weights.gguf.reader import GgufFile, GgufTensor, read_gguf_copy
from ..weights.gguf.weights import FLOATS, elements_of
from ..weights.lora import EMBED, LoraAdapter
from ..weights.tensor import DenseTensor, to_float32
from .modules import adaptable_modules, not_adaptable
from .updates import AdapterTensor, updates_of

_PARTS = (".lora_a", ".lora_b")
# Models that files of an architecture are made of beside those whose name it has.
_ALSO = {"llama": ("MistralForCausalLM",)}
_TILED = ("qwen35", "qwen35moe")  # whose files have value heads by their number within a key head


def read_gguf_adapter(path: Path, description: ModelDescription, max_rank: int) -> LoraAdapter:
    """The adapter in a file. Raises ModelError, naming the file, for one that is broken, not of this model, or of a
    rank above `max_rank`.
    """
    file = read_gguf_copy(path)
    fields = Fields(file)
    _check_kind(fields)
    alpha = fields.number("adapter.lora.alpha")
    name = fields.text("general.architecture")
    architecture = _architecture(path, name, description)
    pairs = _pairs(file)
    tensors = _places(architecture, description, pairs.keys())
    modules = adaptable_modules(description.spec, tensors, tiled=name in _TILED)
    updates = []
    for tensor, parts in pairs.items():
        module = tensor.removesuffix(".weight")
        if module not in modules or module == tensor:
            raise not_adaptable(path, tensor)
        a, b = (_tensor(parts[part]) for part in _PARTS)
        if modules[module][0].name == EMBED:  # its A has a row for each token
            a = replace(a, shape=a.shape[::-1], read=partial(_transposed, parts[_PARTS[0]]))
        # Without alpha B A is added as it is.
        updates += updates_of(modules[module], a, b, None, lambda rank: alpha / rank if alpha else 1.0, max_rank)
    return LoraAdapter(tuple(updates))


def _check_kind(fields: Fields) -> None:
    """Raises ModelError for a file that is no LoRA adapter."""
    if fields.optional_text("general.type") != "adapter":
        raise fields.error("general.type", "adapter, or the file holds none")
    if fields.optional_text("adapter.type") != "lora":
        raise fields.error("adapter.type", "lora")
    if fields.raw("adapter.alora.invocation_tokens") is not None:
        raise ModelError(f"{fields.path}: activated LoRA is not supported; merge the adapter into its model")


def _architecture(path: Path, name: str, description: ModelDescription) -> GgufArchitecture:
    """How files of the model lie. Raises ModelError if the adapter is of another one."""
    if name in ARCHITECTURES:
        for variant in variants_of(name):
            if description.architecture in (variant.name, *_ALSO.get(name, ())):
                return variant
    raise ModelError(
        f"{path}: general.architecture is {shown(name)}, but the model is a {description.architecture}: give an "
        "adapter that was made for it"
    )


def _pairs(file: GgufFile) -> dict[str, dict[str, GgufTensor]]:
    """A and B by the name of the matrix."""
    pairs: dict[str, dict[str, GgufTensor]] = {}
    for name, stored in file.tensors.items():
        part = next((part for part in _PARTS if name.endswith(part)), None)
        if part is None:
            raise ModelError(f"{file.path}: {shown(name)} is not an A or B of a LoRA adapter")
        pairs.setdefault(name.removesuffix(part), {})[part] = stored
    if not pairs:
        raise ModelError(f"{file.path} has no tensors")
    for name, parts in pairs.items():
        if missing := set(_PARTS) - parts.keys():
            raise ModelError(f"{file.path}: {shown(name)} has no {missing.pop().removeprefix('.')}")
    return pairs


def _places(
    architecture: GgufArchitecture, description: ModelDescription, stored: Collection[str]
) -> dict[str, TensorRef]:
    """Where the model's matrices would be in its GGUF file, by Tidewheel's names."""
    shapes = tensor_shapes(description.spec)
    config = _heads(description)
    places = {}
    for name, ref in description.tensors.items():
        found = architecture.reference(name, ref, shapes, stored)
        if found is None or ref.stack:
            continue
        if config and (order := architecture.row_order(name, config)):
            found = replace(found, permute=order)
        places[name] = found
    if in_file := architecture.tensor_name(description.head_name):
        places["head.weight"] = TensorRef(in_file)
    return places


def _heads(description: ModelDescription) -> Mapping[str, Any]:
    """What `row_order` needs of a config; empty for models without such heads."""
    heads = next(description.spec.attentions(), None)
    if heads is None:
        return {}
    return {
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
    }


def _tensor(stored: GgufTensor) -> AdapterTensor:
    return AdapterTensor(stored.path, stored.name, stored.shape, partial(_floats, stored))


def _transposed(stored: GgufTensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(_floats(stored).T)


def _floats(stored: GgufTensor) -> NDArray[np.float32]:
    values, _ = elements_of(stored)
    return to_float32(DenseTensor(values.reshape(stored.shape), FLOATS.get(stored.kind.name, "float32")))
