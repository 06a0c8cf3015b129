"""Mamba2 (https://arxiv.org/abs/2405.21060): layers of nothing but its state space layer. Mamba-Codestral is one."""

from __future__ import annotations

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .mamba_parts import mamba_refs, plain_mixer
from .names import CheckpointNames
from .parts import decoder

ARCHITECTURES = {"Mamba2ForCausalLM": Listing("Mamba2, Mamba-Codestral")}

_LONGEST = 1 << 18  # tokens of a context if none is given; the state takes any number


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Mamba2. There are no positions: the context may be as long as `max_model_len` says."""
    config.refuse("hidden_act", "silu", "swish")
    norm = NormSpec("rms", config.number("layer_norm_epsilon", 1e-5))
    heads, head_dim = config.integer("num_heads", 128), config.integer("head_dim", 64)
    if (size := config.integer("expand", 2) * config.integer("hidden_size")) != heads * head_dim:
        raise ModelError(f"config.json: num_heads {heads} of head_dim {head_dim} are not expand * hidden_size {size}")
    mamba = plain_mixer(config, heads, head_dim, config.integer("state_size", 128), norm)
    layers = ((ResidualBlockSpec(mamba, norm),),) * config.num_layers("num_hidden_layers")
    names = CheckpointNames(
        base="backbone.",
        top={"embed.weight": "embeddings.weight", "final_norm.weight": "norm_f.weight"},
        layers="layers",
        modules={"mamba2_norm": "norm"},
    )
    spec = decoder(config, "mamba2", layers, norm, max(_LONGEST, max_model_len or 0))
    return names.describe(spec, mamba_refs(mamba, "mixer"))
