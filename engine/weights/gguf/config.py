"""From the metadata of a GGUF file to the words of Hugging Face's config.json: what most architectures share.

The keys: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ...errors import ModelError
from . import hybrids
from .fields import Fields
from .reader import GgufFile, GgufTensor

Config = dict[str, Any]
ConfigFields: TypeAlias = Callable[[GgufFile, Fields, Config], Config]
"""More fields of config.json than all models have, from the file, its metadata and the common fields."""

# Tensors that belong to the config.
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
CONFIG_TENSORS = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
_LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")  # as families call it


def no_fields(file: GgufFile, fields: Fields, config: Config) -> Config:
    """None."""
    return {}


def plain_heads(fields: Fields, config: Config, width: int | None = None) -> Config:
    """The sizes of heads and MLPs, the same in all layers that have any; without a `width` `feed_forward_length`.

    Raises ModelError where keys and values differ.
    """
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = fields.integer("attention.key_length", max(hidden // heads, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"that of the keys, {head_dim}")
    if heads * head_dim >= 1 << 24:
        raise fields.error("attention.head_count", "a number of heads that fits the model")
    return {
        "intermediate_size": width or hybrids.of_layers(fields, "feed_forward_length", layers)[0],
        "num_key_value_heads": hybrids.of_layers(fields, "attention.head_count_kv", layers, heads)[0],
        "head_dim": head_dim,
    }


def norm_eps(fields: Fields, layer_norm: bool) -> Config:
    """The epsilon of norms, under the names that families have for it."""
    if not layer_norm:
        return {"rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon")}
    return dict.fromkeys(_LAYER_NORM_EPS, fields.number("attention.layer_norm_epsilon"))


def plain_rope(file: GgufFile, fields: Fields, config: Config) -> Config:
    """The fields of rope: the base, how much of a head is rotated, and how it is scaled."""
    head_dim = config["head_dim"]
    theta, dim = fields.optional_number("rope.freq_base"), fields.integer("rope.dimension_count", head_dim)
    rope: Config = {"rope_theta": 10000.0 if theta is None else theta}
    if dim != head_dim:
        rope["partial_rotary_factor"] = dim / head_dim
    kind = fields.optional_text("rope.scaling.type") or "none"
    factor = fields.optional_number("rope.scaling.factor")
    if factor is None:
        factor = fields.optional_number("rope.scale_linear")
        kind = "linear" if factor is not None and kind == "none" else kind
    if ROPE_FACTORS in file.tensors or LONG_FACTORS in file.tensors:
        if kind in ("linear", "yarn"):
            raise fields.error("rope.scaling.type", "none or longrope in a file that has factors of its own")
        return rope | _factors(file, fields)
    if kind in ("none", "linear") and factor is not None and factor != 1:
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor} if kind == "linear" else None
    elif kind == "yarn":
        rope["rope_scaling"] = _yarn(fields)
    elif kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", "none, linear or yarn, or the file must have the factors of longrope")
    return rope


def rope_by_sections(*, interleaved: bool) -> Callable[[GgufFile, Fields, Config], Config]:
    """The same of models that see images: pairs turn by time, height or width. Sections of these follow each other or,
    `interleaved`, take turns. Files whose sections are not of all pairs are of models that see nothing.
    """

    def rope(file: GgufFile, fields: Fields, config: Config) -> Config:
        given = plain_rope(file, fields, config)
        sections = fields.raw("rope.dimension_sections")
        pairs = fields.integer("rope.dimension_count", config["head_dim"]) // 2
        if not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu" or sections[:3].sum() != pairs:
            return given
        axes = {"mrope_section": sections[:3].tolist(), "mrope_interleaved": interleaved}
        return {**given, "rope_scaling": {"rope_type": "default", **(given.get("rope_scaling") or {}), **axes}}

    return rope


def _yarn(fields: Fields) -> Config:
    factor = fields.number("rope.scaling.factor")
    scaling: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
    }
    if (scale := fields.optional_number("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = scale * (1 + 0.1 * math.log(max(factor, 1)))
    for name in ("beta_fast", "beta_slow"):
        if (beta := fields.optional_number(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = beta
    return scaling


def _factors(file: GgufFile, fields: Fields) -> Config:
    """Factors that the file gives one by one: Llama 3.1's, which hold at any length, or LongRoPE's."""
    if ROPE_FACTORS in file.tensors:
        factors = float32_vector(file.tensors[ROPE_FACTORS])
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_scaling": scaling, "original_max_position_embeddings": fields.integer("context_length")}
    if SHORT_FACTORS not in file.tensors:
        raise ModelError(f"{file.path} has {LONG_FACTORS} but not {SHORT_FACTORS}")
    scaling = {
        "rope_type": "longrope",
        "short_factor": float32_vector(file.tensors[SHORT_FACTORS]),
        "long_factor": float32_vector(file.tensors[LONG_FACTORS]),
    }
    if (scale := fields.optional_number("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = scale
    # Converters of MiniCPM do not write it, whose models are not stretched.
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def float32_vector(tensor: GgufTensor) -> list[float]:
    """The numbers of a tensor of the config, all above 0. Raises ModelError for one that is no vector of F32."""
    if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise ModelError(f"{tensor.origin} must be a vector of F32")
    numbers = np.frombuffer(tensor.data.tobytes(), "<f4")
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ModelError(f"{tensor.origin} must hold finite numbers above 0")
    factors: list[float] = numbers.tolist()
    return factors
