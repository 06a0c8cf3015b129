"""MPT (https://www.databricks.com/blog/mpt-7b): ALiBi instead of position embeddings, no biases anywhere."""

from __future__ import annotations

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import AttentionSpec, DecoderSpec, EmbeddingSpec, HeadSpec, MlpSpec, NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import CheckpointNames, fused_rows
from .parts import alibi_slopes

_LISTING = Listing(
    "MPT", refused="learned positions, `clip_qkv`, `qk_ln`, `prefix_lm`, biases, an expansion ratio other than 4"
)
# The original's name, which the released files have, and that of transformers.
ARCHITECTURES = {"MPTForCausalLM": _LISTING, "MptForCausalLM": _LISTING}

_NAMES = CheckpointNames(
    base="transformer.",
    top={"embed.weight": "wte.weight", "final_norm.weight": "norm_f.weight"},
    layers="blocks",
    modules={
        "attention_norm": "norm_1",
        "o": "attn.out_proj",
        "mlp_norm": "norm_2",
        "up": "ffn.up_proj",
        "down": "ffn.down_proj",
    },
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """MPT as transformers has it, which knows fewer options than the original and ignores the rest."""
    config.refuse("expansion_ratio", 4)
    config.refuse("no_bias", True)
    config.refuse("logit_scale")
    config.refuse("norm_type", "low_precision_layernorm", "layernorm")
    hidden, max_positions = config.integer("d_model"), config.integer("max_seq_len")
    attention, norm = _attention(config, hidden), NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    layer = (ResidualBlockSpec(attention, norm), ResidualBlockSpec(MlpSpec(4 * hidden, "gelu", gated=False), norm))
    spec = DecoderSpec(
        family="mpt",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=max_positions,
        embedding=EmbeddingSpec(hidden),
        layers=(layer,) * config.num_layers("n_layers"),
        final_norm=norm,
        head=HeadSpec(config.flag("tie_word_embeddings", True)),
    )
    return _NAMES.describe(spec, fused_rows("attn.Wqkv", q=hidden, k=hidden, v=hidden))


def _attention(config: ConfigReader, hidden: int) -> AttentionSpec:
    num_heads, fields = config.integer("n_heads"), config.with_defaults(attn_config={}).raw("attn_config")
    if not isinstance(fields, dict):
        raise config.error("attn_config", "an object")
    options = ConfigReader(fields, "config.json: attn_config")
    options.refuse("attn_type", "multihead_attention")
    options.refuse("alibi", True)
    options.refuse("alibi_bias_max", 8)
    options.refuse("clip_qkv", 0)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        options.refuse(name, False)
    slopes = alibi_slopes(config, "n_heads")
    if hidden % num_heads:
        raise ModelError(f"config.json: n_heads {num_heads} must divide d_model {hidden}")
    head_dim = hidden // num_heads
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=options.number("softmax_scale", head_dim**-0.5),
        alibi_slopes=slopes,
    )
