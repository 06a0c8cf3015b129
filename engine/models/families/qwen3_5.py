"""Qwen3.5 and 3.6 (https://qwen.ai/blog?id=qwen3.5), dense: Qwen3-Next with its matrices apart; the text part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import MixerSpec, NormSpec, ResidualBlockSpec
from ..tensor_ref import TensorRef
from .hybrids import DELTA_NET_MODULES, conv_taps, gated_queries, qwen_attention, qwen_delta_net, qwen_layers
from .listing import Listing
from .mtp_parts import qwen_mtp
from .names import PRE_NORMS, fused_rows, llama_names
from .parts import decoder, gated_mlp

_MULTIMODAL = "Qwen3_5ForConditionalGeneration"
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": Listing("Qwen3.5 and 3.6, dense"),
    _MULTIMODAL: Listing("Qwen3.5 and 3.6, dense: their text part"),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3.5, with the MTP layer that its checkpoints have. Of a multimodal model it is the language model."""
    if architecture == _MULTIMODAL:
        config = text_config(config)
    config = config.with_defaults(num_key_value_heads=4)
    mlps = [gated_mlp(config)] * config.num_layers("num_hidden_layers")
    if architecture != _MULTIMODAL:
        return described("qwen3_5", config, mlps, max_model_len, PRE_NORMS)
    description = described("qwen3_5", config, mlps, max_model_len, PRE_NORMS, base="model.language_model.")
    return replace(description, text_part=True)


def described(
    family: str,
    config: ConfigReader,
    mlps: Sequence[MixerSpec],
    max_model_len: int | None,
    modules: Mapping[str, str],
    refs: Mapping[str, TensorRef] = MappingProxyType({}),
    base: str = "model.",
) -> ModelDescription:
    """A Qwen3.5 with these MLPs or experts, whose weights are where `modules` and `refs` say."""
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads, rope = qwen_attention(config, norm, max_model_len)
    net = qwen_delta_net(config)
    mixers: dict[str, MixerSpec] = {"full_attention": heads, "linear_attention": net}
    layers = tuple(
        (ResidualBlockSpec(mixers[kind], norm), ResidualBlockSpec(mlp, norm))
        for kind, mlp in zip(qwen_layers(config), mlps, strict=True)
    )
    refs = {
        **refs,
        **gated_queries(heads),
        **fused_rows("linear_attn.in_proj_qkv", delta_q=net.key_size, delta_k=net.key_size, delta_v=net.value_size),
        "delta_conv": conv_taps("linear_attn.conv1d"),
    }
    modules = {
        **modules,
        **DELTA_NET_MODULES,
        "delta_z": "linear_attn.in_proj_z",
        "delta_b": "linear_attn.in_proj_b",
        "delta_a": "linear_attn.in_proj_a",
    }
    spec = decoder(config, family, layers, norm, rope.max_positions)
    names = llama_names(modules, base)
    description = names.describe(spec, refs)
    if config.raw("mtp_num_hidden_layers") == 0:
        return description
    layer = (ResidualBlockSpec(heads, norm), ResidualBlockSpec(mlps[-1], norm))
    return replace(description, mtp=qwen_mtp(names, norm, layer, spec.hidden_size, refs))


def text_config(config: ConfigReader) -> ConfigReader:
    """The language model's part of a multimodal config. Whether the head is tied may be said beside it."""
    inner = config.raw("text_config")
    if not isinstance(inner, dict):
        raise config.error("text_config", "an object")
    if not all(isinstance(name, str) for name in inner):
        raise ModelError("config.json: text_config must have names")
    tied = config.raw("tie_word_embeddings")
    return ConfigReader(
        {**inner, **({} if tied is None else {"tie_word_embeddings": tied})}, "config.json: text_config"
    )
