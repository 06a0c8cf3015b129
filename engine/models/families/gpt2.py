"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

Its checkpoints hold linear weights as `(in_features, out_features)`, and query, key and value in one matrix.
"""

from __future__ import annotations

from dataclasses import replace

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
from ..tensor_ref import TensorRef
from .listing import Listing
from .names import CheckpointNames, fused_rows

ARCHITECTURES = {"GPT2LMHeadModel": Listing("GPT-2", refused="cross-attention")}

_NAMES = CheckpointNames(
    base="transformer.",
    top={
        "embed.weight": "wte.weight",
        "embed.positions": "wpe.weight",
        "final_norm.weight": "ln_f.weight",
        "final_norm.bias": "ln_f.bias",
    },
    layers="h",
    modules={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
)
_LINEARS = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """GPT-2. `reorder_and_upcast_attn` asks for attention scores in float32, which devices compute anyway."""
    config.refuse("add_cross_attention", False)
    hidden, num_heads = config.integer("n_embd"), config.integer("n_head")
    if hidden % num_heads:
        raise ModelError(f"config.json: n_head {num_heads} must divide n_embd {hidden}")
    head_dim, num_positions = hidden // num_heads, config.integer("n_positions")
    base_scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_depth = config.flag("scale_attn_by_inverse_layer_idx", False)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    mlp = MlpSpec(
        config.integer("n_inner", 4 * hidden),
        config.activation("activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    layers = tuple(
        (
            ResidualBlockSpec(
                AttentionSpec(
                    num_heads=num_heads,
                    num_kv_heads=num_heads,
                    head_dim=head_dim,
                    scale=base_scale / (i + 1) if by_depth else base_scale,
                    qkv_bias=True,
                    out_bias=True,
                ),
                norm,
            ),
            ResidualBlockSpec(mlp, norm),
        )
        for i in range(config.num_layers("n_layer"))
    )
    spec = DecoderSpec(
        family="gpt2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=num_positions,
        embedding=EmbeddingSpec(size=hidden, num_positions=num_positions),
        layers=layers,
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
    )
    linears = {module: TensorRef(name) for module, name in _LINEARS.items()}
    linears |= fused_rows("attn.c_attn", q=hidden, k=hidden, v=hidden)
    return _NAMES.describe(spec, {module: replace(ref, transpose=True) for module, ref in linears.items()})
