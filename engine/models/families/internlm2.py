"""InternLM 2 and 2.5 (https://arxiv.org/abs/2403.17297): Llama with queries, keys and values in one matrix.

The matrix holds, for each KV head, its query heads, its key and its value.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import CheckpointNames, fused_heads
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"InternLM2ForCausalLM": Listing("InternLM 2, InternLM 2.5")}

_NAMES = CheckpointNames(
    base="model.",
    top={"embed.weight": "tok_embeddings.weight", "final_norm.weight": "norm.weight"},
    layers="layers",
    modules={
        "attention_norm": "attention_norm",
        "o": "attention.wo",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    },
    head="output.weight",
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """InternLM 2."""
    bias = config.flag("bias", True)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm, mixer = NormSpec("rms", config.number("rms_norm_eps", 1e-6)), replace(heads, rope=rope.spec)
    layers = pre_norm_layers([mixer] * uniform_layers(config), gated_mlp(config), norm)
    spec = decoder(config, "internlm2", layers, norm, rope.max_positions)
    queries = heads.num_heads // heads.num_kv_heads
    return _NAMES.describe(spec, fused_heads("attention.wqkv", queries, heads.head_dim))
