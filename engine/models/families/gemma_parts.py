"""Shared by Gemma 3n and Gemma 4: per-layer embeddings, and K and V that the last layers read from earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...errors import ModelError
from ..config import ConfigReader
from ..spec import NormSpec, PerLayerEmbeddingSpec
from .names import CheckpointNames, llama_names

_VOCAB_SIZE = 262_144
_TOP = {
    "embed.per_layer": "embed_tokens_per_layer.weight",
    "embed.per_layer_projection.weight": "per_layer_model_projection.weight",
    "embed.per_layer_norm.weight": "per_layer_projection_norm.weight",
}
_MODULES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "per_layer_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_projection",
    "per_layer_post_norm": "post_per_layer_input_norm",
}


def per_layer_names(modules: Mapping[str, str], top: Mapping[str, str] = MappingProxyType({})) -> CheckpointNames:
    """Names in checkpoints with per-layer embeddings. `modules` and `top` are those that only one family has."""
    names = llama_names({**_MODULES, **modules})
    return replace(names, top={**names.top, **_TOP, **top})


def per_layer_size(config: ConfigReader) -> int:
    """How many values a layer gets for a token: 0 in models without per-layer embeddings."""
    return 0 if config.raw("hidden_size_per_layer_input") == 0 else config.integer("hidden_size_per_layer_input", 256)


def per_layer_embedding(config: ConfigReader, norm: NormSpec) -> PerLayerEmbeddingSpec | None:
    """The per-layer embedding of tokens; None in models without it."""
    size = per_layer_size(config)
    if not size:
        return None
    vocab_size = config.integer("vocab_size_per_layer_input", _VOCAB_SIZE)
    return PerLayerEmbeddingSpec(vocab_size, size, size**0.5, config.integer("hidden_size") ** -0.5, 2**-0.5, norm)


def layers_with_kv(config: ConfigReader, num_layers: int, default: int = 0) -> int:
    """How many layers have their own K and V; the last ones read other layers'."""
    shared = config.raw("num_kv_shared_layers")
    shared = shared if shared == 0 else config.optional_integer("num_kv_shared_layers", default) or 0
    if shared >= num_layers:
        raise config.error("num_kv_shared_layers", f"less than the {num_layers} layers")
    return num_layers - int(shared)


def last_with(windows: Sequence[int | None], window: int | None) -> int:
    """The last layer with its own K and V and this window. Raises ModelError if there is none."""
    for index in reversed(range(len(windows))):
        if windows[index] == window:
            return index
    raise ModelError("config.json: num_kv_shared_layers leaves a layer without an earlier one of its type")
