"""GPT-J (https://github.com/kingoflolz/mesh-transformer-jax): attention and MLP side by side after one LayerNorm.

A part of each head is rotated, in neighbouring pairs, and the head has a bias.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import MlpSpec, NormSpec, ParallelSpec, ResidualBlockSpec
from .listing import Listing
from .names import CheckpointNames
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"GPTJForCausalLM": Listing("GPT-J", refused="a `rotary_dim` of null")}

_NAMES = CheckpointNames(
    base="transformer.",
    top={"embed.weight": "wte.weight", "final_norm.weight": "ln_f.weight", "final_norm.bias": "ln_f.bias"},
    layers="h",
    modules={
        "parallel_norm": "ln_1",
        "q": "attn.q_proj",
        "k": "attn.k_proj",
        "v": "attn.v_proj",
        "o": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """GPT-J. A `rotary_dim` of null is refused: what it means depends on the implementation."""
    if "rotary_dim" in config and config.raw("rotary_dim") is None:
        raise config.error("rotary_dim", "the number of rotated dimensions in a head")
    config = config.with_fields(
        # It has its own names for these, and looks at no others.
        hidden_size=config.integer("n_embd"),
        num_attention_heads=config.integer("n_head"),
        num_hidden_layers=config.num_layers("n_layer"),
        max_position_embeddings=config.integer("n_positions", 2048),
        num_key_value_heads=None,
        head_dim=None,
        rope_theta=None,
        partial_rotary_factor=None,
    )
    heads, rotary_dim = attention(config), config.integer("rotary_dim", 64)
    if rotary_dim > heads.head_dim:
        raise ModelError(f"config.json: rotary_dim {rotary_dim} is more than the {heads.head_dim} dimensions of a head")
    rope = rope_from_config(config, rotary_dim, max_model_len)
    mixer = replace(heads, rope=replace(rope.spec, interleaved=True))
    activation = config.activation("activation_function", "gelu_new")
    mlp = MlpSpec(config.integer("n_inner", 4 * config.integer("n_embd")), activation, gated=False, bias=True)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = (ResidualBlockSpec(ParallelSpec((ResidualBlockSpec(mixer), ResidualBlockSpec(mlp))), norm),)
    layers = (layer,) * uniform_layers(config)
    return _NAMES.describe(decoder(config, "gptj", layers, norm, rope.max_positions, head_bias=True))
