"""OPT (https://arxiv.org/abs/2205.01068): learned positions, LayerNorm, a plain MLP."""

from __future__ import annotations

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    NormSpec,
    ResidualBlockSpec,
)
from .listing import Listing
from .names import CheckpointNames

ARCHITECTURES = {"OPTForCausalLM": Listing("OPT", refused="norms without weights")}

# The first two rows of OPT's position table are never used: its training code kept them for padding.
_POSITION_OFFSET = 2

_NAMES = CheckpointNames(
    base="model.",
    top={
        "embed.weight": "decoder.embed_tokens.weight",
        "embed.positions": "decoder.embed_positions.weight",
        "embed.project_in.weight": "decoder.project_in.weight",
        "embed.project_out.weight": "decoder.project_out.weight",
        "final_norm.weight": "decoder.final_layer_norm.weight",
        "final_norm.bias": "decoder.final_layer_norm.bias",
    },
    layers="decoder.layers",
    modules={
        "attention_norm": "self_attn_layer_norm",
        "attention_sum_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp_sum_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """OPT; the 350m variant normalizes after each residual sum and has no final norm."""
    config.refuse("layer_norm_elementwise_affine", True)
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % num_heads:
        raise ModelError(f"config.json: num_attention_heads {num_heads} must divide hidden_size {hidden}")
    max_positions, bias = config.integer("max_position_embeddings"), config.flag("enable_bias", True)
    norm_before = config.flag("do_layer_norm_before", True)
    norm = NormSpec("layer", eps=1e-5, bias=True)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        scale=(hidden // num_heads) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = MlpSpec(config.integer("ffn_dim"), config.activation("activation_function", "relu"), gated=False, bias=bias)
    layer = tuple(
        ResidualBlockSpec(mixer, norm) if norm_before else ResidualBlockSpec(mixer, sum_norm=norm)
        for mixer in (attention, mlp)
    )
    spec = DecoderSpec(
        family="opt",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=max_positions,
        embedding=EmbeddingSpec(
            size=config.integer("word_embed_proj_dim", hidden),
            num_positions=max_positions,
            position_offset=_POSITION_OFFSET,
        ),
        layers=(layer,) * config.num_layers("num_hidden_layers"),
        final_norm=norm if norm_before and not config.flag("_remove_final_layer_norm", False) else None,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
    )
    return _NAMES.describe(spec)
