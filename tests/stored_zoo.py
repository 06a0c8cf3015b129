"""Families of the zoo with matrices in the formats of quantized files, each part of a layer in another format.

Their numbers are random, and no model of transformers has them: they are for tests that must hold for any numbers.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import models_zoo
import numpy as np
from engine.weights.stored_tensors import KINDS, holds, stored

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec, tensor_shapes
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.quantization import TensorFormat, is_router
from tidewheel.engine.weights.tensor import DenseTensor, WeightTensor

# One for each kind of layer, and of what is around it.
MIXERS = (
    "llama-bias", "gemma2", "falcon-alibi", "olmoe", "gpt-oss", "gemma3n", "gemma4-experts", "deepseek-v3", "minicpm3",
    "qwen3_5", "qwen3_next-experts", "granitemoehybrid-experts", "falcon-h1", "mamba2", "lfm2-experts",
)  # fmt: skip
_MIN_PARTS = 4
FIRST_KINDS = KINDS[::_MIN_PARTS]
"""Formats to begin with, so that each comes to some part of a family."""
_WIDTH = 256  # so that a row has a whole block of every type
_WIDTHS = (
    "hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner",
    "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "n_heads", "num_heads")
_LAYER = re.compile(r"(layers\.\d+)\.((?:experts|shared|gate|up|down)\.)?")
_TABLES = ("embed.weight", "embed.positions", "embed.per_layer")  # which are looked up


def wider(case: models_zoo.Case) -> dict[str, Any]:
    """What to change in its config so that it is wider, with as many more heads."""
    fields: dict[str, Any] = {}
    for field, value in case.config.items():
        if field in _WIDTHS:
            fields[field] = [_WIDTH] * len(value) if isinstance(value, list) else _WIDTH
        elif field in _HEADS:
            fields[field] = {1: 1, 6: 16}.get(value, 4 * value)
    if case.config.get("word_embed_proj_dim") == case.config.get("hidden_size", 0):
        fields["word_embed_proj_dim"] = _WIDTH
    return fields


@functools.cache
def spec(name: str) -> DecoderSpec:
    """CASES[name], but wider."""
    case = models_zoo.CASES[name]
    return describe(models_zoo.config_json(replace(case, config=case.config | wider(case)))).spec


def _parts(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(_part(name) for name, shape in shapes.items() if len(shape) == 2))


def _part(name: str) -> tuple[str, ...]:
    """The part with one format: a layer's MLP or experts, the rest of the layer, or a matrix outside of layers."""
    found = _LAYER.match(name)
    return (name,) if found is None else (found[1], "mlp" if found[2] else "mixer")


class StoredFamily:
    """A WeightSource of `spec(name)`, whose parts have one format after the other, from `first_kind` on.

    A matrix that a format cannot hold has the next one that can, or floats. So have routers, as in files.
    """

    dtype: DType = "bfloat16"
    identity: str | None = None

    def __init__(self, name: str, first_kind: str) -> None:
        self._shapes = tensor_shapes(spec(name))
        begin, parts = KINDS.index(first_kind), _parts(self._shapes)
        assert len(parts) >= _MIN_PARTS
        at = {part: begin + i for i, part in enumerate(parts)}
        self.kinds: dict[str, str] = {}
        for tensor, shape in self._shapes.items():
            if len(shape) == 2 and not is_router(tensor):
                turn = (KINDS[(at[_part(tensor)] + i) % len(KINDS)] for i in range(len(KINDS)))
                fitting = next((kind for kind in turn if holds(kind, shape, looked_up=tensor in _TABLES)), None)
                self.kinds |= {} if fitting is None else {tensor: fitting}

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> WeightTensor:
        shape = self._shapes[name]
        if name in self.kinds:
            return stored(self.kinds[name], (shape[0], shape[1]), name)
        numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        if len(shape) > 1:
            return DenseTensor(numbers / np.float32(shape[-1] ** 0.5), "float32")
        middle = 1 if name.endswith(("weight", "scale", "scales")) else 0
        return DenseTensor(np.float32(0.2) * numbers + np.float32(middle), "float32")

    def stored_format(self, name: str) -> TensorFormat | None:
        tensor = self[name] if name in self.kinds else None
        return None if tensor is None or isinstance(tensor, DenseTensor) else tensor.stored_format
