"""Shared by families with delta nets: the types of their layers, and Qwen's attention with an output gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config import ConfigReader
from ..rope import Rope, rope_from_config
from ..spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, MixerSpec, MlpSpec, NormSpec, RouterSpec
from ..tensor_ref import TensorRef
from .expert_parts import QWEN_EXPERTS, expert_count, experts_per_token, shared_expert, sparse_layers
from .parts import attention, gated_mlp


def typed_layers(config: ConfigReader, types: Sequence[str], default: Callable[[int], str]) -> list[str]:
    """Each layer's type, one of `types`; without `layer_types` the `default` of its index. Raises ModelError."""
    num_layers, layer_types = config.num_layers("num_hidden_layers"), config.raw("layer_types")
    if layer_types is None:
        return [default(i) for i in range(num_layers)]
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(not isinstance(t, str) or t not in types for t in layer_types)
    ):
        raise config.error("layer_types", f"a list of {num_layers} entries, each one of {', '.join(types)}")
    return layer_types


def qwen_layers(config: ConfigReader) -> list[str]:
    """The kind of attention of a Qwen3-Next's layers: every fourth is full, unless the config says otherwise."""
    every = config.integer("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return typed_layers(config, kinds, lambda i: kinds[(i + 1) % every == 0])


def qwen_delta_net(config: ConfigReader) -> DeltaNetSpec:
    """The delta net of a Qwen3-Next. Raises ModelError for heads that do not divide.

    GGUF files have the value heads in another order: readers of these say so with `linear_value_heads_tiled`.
    """
    config.refuse("hidden_act", "silu", "swish")
    key_heads = config.integer("linear_num_key_heads", 16)
    value_heads = config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
    return DeltaNetSpec(
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim", 128),
        config.integer("linear_value_head_dim", 128),
        config.integer("linear_conv_kernel_dim", 4),
        NormSpec("rms", config.number("rms_norm_eps", 1e-6)),
        tiled=config.flag("linear_value_heads_tiled", False),
    )


def qwen_attention(config: ConfigReader, norm: NormSpec, max_model_len: int | None) -> tuple[AttentionSpec, Rope]:
    """The full attention of a Qwen3-Next: a quarter of each head turns, and sigmoid gates its output.

    Where a config has sections of rope, for images, they take turns.
    """
    bias = config.flag("attention_bias", False)
    heads = attention(config.with_defaults(head_dim=256), qkv_bias=bias, out_bias=bias)
    config = config.with_defaults(partial_rotary_factor=0.25)
    for name in ("rope_scaling", "rope_parameters"):
        value = config.raw(name)
        if isinstance(value, dict) and value:
            config = config.with_fields(**{name: {**value, "mrope_interleaved": True}})
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    return replace(heads, rope=rope.spec, qk_norm=norm, output_gate=True), rope


def qwen_mlps(config: ConfigReader, num_experts: int = 512, per_token: int = 10) -> list[MixerSpec]:
    """Each layer's experts with a gated shared expert, or its MLP. The numbers are for a config without them."""
    num_layers = config.num_layers("num_hidden_layers")
    if config.raw("num_experts") == 0:
        return [gated_mlp(config)] * num_layers
    config = config.with_defaults(num_experts=num_experts, num_experts_per_tok=per_token)
    count = expert_count(config, "num_experts")
    experts = ExpertsSpec(
        count,
        experts_per_token(config, count),
        config.integer("moe_intermediate_size", 512),
        router=RouterSpec(normalize=config.flag("norm_topk_prob", True)),
        shared=MlpSpec(config.integer("shared_expert_intermediate_size", 512), "silu", gated=True),
        shared_gate=True,
    )
    has_experts = sparse_layers(config)
    return [experts if has_experts(layer) else gated_mlp(config) for layer in range(num_layers)]


def gated_queries(heads: AttentionSpec) -> dict[str, TensorRef]:
    """Queries and gates out of one matrix that holds, for each head, its query and then its gate."""
    both, one = 2 * heads.head_dim, heads.head_dim
    return {
        "q": TensorRef("self_attn.q_proj", each=(both, 0, one)),
        "q_gate": TensorRef("self_attn.q_proj", each=(both, one, both)),
    }


def conv_taps(name: str) -> TensorRef:
    """A depthwise convolution's weights, `[channels, 1, taps]`, as Tidewheel has them."""
    return TensorRef(name, transpose=True, flat=True)


SHARED_EXPERT_MODULES = {
    **QWEN_EXPERTS,
    **shared_expert("mlp.shared_expert"),
    "shared_gate": "mlp.shared_expert_gate",
}

# The modules of a delta net layer that all Qwens call alike.
DELTA_NET_MODULES = {
    "delta_net_norm": "input_layernorm",
    "delta": "linear_attn",
    "delta_head_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
}
