"""Command R (https://docs.cohere.com/docs/command-r), Command R7B and Command A (https://arxiv.org/abs/2504.00698).

Attention and MLP lie side by side after one LayerNorm without bias. Command R rotates all layers; the others, Cohere2,
rotate the layers with a window, and those without know no positions.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import AttentionSpec, NormSpec, ParallelSpec, ResidualBlockSpec, RopeSpec
from ..tensor_ref import TensorRef
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, uniform_layers, with_windows

ARCHITECTURES = {
    "CohereForCausalLM": Listing("Command R", refused="sequential blocks; MLPs without a gate"),
    "Cohere2ForCausalLM": Listing("Command R7B, Command A", refused="as for Command R; `use_qk_norm`"),
}

_NAMES = llama_names({"parallel_norm": "input_layernorm"})
_HEAD_NORMS = {name: TensorRef(f"self_attn.{name}", flat=True) for name in ("q_norm", "k_norm")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Command R, or a Cohere2. Norms of queries and keys have weights for each head."""
    config.refuse("use_parallel_block", True)
    config.refuse("use_gated_activation", True)
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5))
    if architecture == "CohereForCausalLM":
        config = config.with_defaults(rope_theta=5e5)
        if config.flag("use_qk_norm", False):
            heads = replace(heads, qk_norm=norm, qk_norm_over="each")
    else:
        config.refuse("use_qk_norm", False)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    rotation = replace(rope.spec, interleaved=True)
    if architecture == "CohereForCausalLM":
        family, mixers = "cohere", (replace(heads, rope=rotation),) * uniform_layers(config)
    else:
        family, mixers = "cohere2", _windowed(config, heads, rotation)
    mlp = gated_mlp(config)
    spec = decoder(
        config,
        family,
        tuple(
            (ResidualBlockSpec(ParallelSpec((ResidualBlockSpec(mixer), ResidualBlockSpec(mlp))), norm),)
            for mixer in mixers
        ),
        norm,
        rope.max_positions,
        tied=True,
        divisor=1 / config.number("logit_scale", 0.0625),
    )
    return _NAMES.describe(spec, _HEAD_NORMS)


def _windowed(config: ConfigReader, heads: AttentionSpec, rotation: RopeSpec) -> tuple[AttentionSpec, ...]:
    every = config.integer("sliding_window_pattern", 4)
    windows = layer_windows(config, config.optional_integer("sliding_window", 4096), lambda i: (i + 1) % every != 0)
    return tuple(
        mixer if mixer.sliding_window is None else replace(mixer, rope=rotation)
        for mixer in with_windows(heads, windows)
    )
