"""Qwen3.5 and 3.6 (https://qwen.ai/blog?id=qwen3.5), dense: Qwen3-Next with its matrices apart; the text part."""

from __future__ import annotations

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import BranchSpec, MixerSpec, NormSpec
from .hybrids import DELTA_NET_MODULES, conv_taps, gated_queries, qwen_attention, qwen_delta_net, qwen_layers
from .listing import Listing
from .names import PRE_NORMS, fused_rows, llama_names
from .parts import decoder, gated_mlp

_MULTIMODAL = "Qwen3_5ForConditionalGeneration"
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": Listing("Qwen3.5 and 3.6, dense, without their MTP layer"),
    _MULTIMODAL: Listing("Qwen3.5 and 3.6, dense: their text part, without the MTP layer"),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3.5. Of a multimodal model it is the language model; MTP layers of either are left out."""
    if architecture == _MULTIMODAL:
        config = text_config(config)
    config = config.with_defaults(num_key_value_heads=4)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads, rope = qwen_attention(config, norm, max_model_len)
    net, mlp = qwen_delta_net(config), BranchSpec(gated_mlp(config), norm)
    mixers: dict[str, MixerSpec] = {"full_attention": heads, "linear_attention": net}
    layers = tuple((BranchSpec(mixers[kind], norm), mlp) for kind in qwen_layers(config))
    refs = {
        **gated_queries(heads),
        **fused_rows("linear_attn.in_proj_qkv", delta_q=net.key_size, delta_k=net.key_size, delta_v=net.value_size),
        "delta_conv": conv_taps("linear_attn.conv1d"),
    }
    modules = {
        "delta_z": "linear_attn.in_proj_z",
        "delta_b": "linear_attn.in_proj_b",
        "delta_a": "linear_attn.in_proj_a",
    }
    base = "model.language_model." if architecture == _MULTIMODAL else "model."
    names = llama_names({**PRE_NORMS, **DELTA_NET_MODULES, **modules}, base)
    return names.describe(decoder(config, "qwen3_5", layers, norm, rope.max_positions), refs)


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
