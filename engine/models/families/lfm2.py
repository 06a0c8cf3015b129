"""LFM2 (https://arxiv.org/abs/2511.23404), dense: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import MixerSpec, MlpSpec, NormSpec, ResidualBlockSpec, ShortConvSpec
from .hybrids import conv_taps, typed_layers
from .listing import Listing
from .names import fused_rows, llama_names
from .parts import attention, decoder

ARCHITECTURES = {"Lfm2ForCausalLM": Listing("LFM2 and LFM2.5, dense")}

_MODULES = {
    "o": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "conv_out": "conv.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "attention_norm": "operator_norm",
    "short_conv_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """LFM2."""
    mlp = MlpSpec(_mlp_size(config), "silu", gated=True)
    return described("lfm2", config, [mlp] * config.num_layers("num_hidden_layers"), max_model_len)


def described(
    family: str,
    config: ConfigReader,
    mlps: Sequence[MixerSpec],
    max_model_len: int | None,
    modules: Mapping[str, str] = MappingProxyType({}),
) -> ModelDescription:
    """An LFM2 with these MLPs or experts; `modules` are the names of these."""
    hidden = config.integer("hidden_size")
    if config.raw("num_key_value_heads") is None:
        config = config.with_fields(num_key_value_heads=8)
    heads = attention(config)
    rope = rope_from_config(config.with_defaults(rope_theta=1e6), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("norm_eps", 1e-5))
    mixers: dict[str, MixerSpec] = {
        "full_attention": replace(heads, rope=rope.spec, qk_norm=norm),
        "conv": ShortConvSpec(hidden, config.integer("conv_L_cache", 3), config.flag("conv_bias", False)),
    }
    layers = tuple(
        (ResidualBlockSpec(mixers[kind], norm), ResidualBlockSpec(mlp, norm))
        for kind, mlp in zip(_layer_types(config), mlps, strict=True)
    )
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    spec = decoder(config.with_fields(tie_word_embeddings=tied), family, layers, norm, rope.max_positions)
    refs = fused_rows("conv.in_proj", conv_b=hidden, conv_c=hidden, conv_x=hidden)
    names = llama_names({**_MODULES, **modules})
    names = replace(names, top={**names.top, "final_norm.weight": "embedding_norm.weight"})
    return names.describe(spec, {**refs, "conv_taps": replace(conv_taps("conv.conv"))})


def _layer_types(config: ConfigReader) -> list[str]:
    attending = config.raw("full_attn_idxs")
    if attending is not None and (
        not isinstance(attending, list) or any(type(i) is not int or i < 0 for i in attending)
    ):
        raise config.error("full_attn_idxs", "a list of the numbers of layers")
    return typed_layers(
        config,
        ("full_attention", "conv"),
        lambda i: "full_attention" if attending is None or i in attending else "conv",
    )


def _mlp_size(config: ConfigReader) -> int:
    """Two thirds of what the config says, times a factor, and rounded up, unless it says that it is meant as it is."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size", 12288))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    factor = config.optional_number("block_ffn_dim_multiplier", 1.0)
    multiple = config.integer("block_multiple_of", 256)
    if factor is not None:
        size = multiple * -(-int(factor * size) // multiple)
    return size
