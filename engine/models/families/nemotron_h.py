"""Nemotron-H (https://arxiv.org/abs/2504.03624): layers of one mixer each, Mamba2, attention, an MLP or experts.

Attention has no positions, and no MLP has a gate.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import ExpertsSpec, Mamba2Spec, MixerSpec, MlpSpec, NormSpec, ResidualBlockSpec
from .deepseek_experts import grouped_experts
from .expert_parts import shared_expert, single_experts
from .listing import Listing
from .mamba_parts import mamba_refs, plain_mixer
from .names import CheckpointNames
from .parts import attention, decoder

ARCHITECTURES = {
    "NemotronHForCausalLM": Listing(
        "Nemotron-H, Nemotron Nano 2 and 3, without MTP layers", refused="experts on a latent (`moe_latent_size`)"
    )
}

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of a pattern
_TYPES = {
    **{kind: kind for kind in _LETTERS.values()},
    "linear_attention": "mamba",
    "full_attention": "attention",
}
_NAMES = CheckpointNames(
    base="backbone.",
    top={"embed.weight": "embeddings.weight", "final_norm.weight": "norm_f.weight"},
    layers="layers",
    modules={
        **dict.fromkeys(("mamba2_norm", "attention_norm", "mlp_norm", "experts_norm"), "norm"),
        **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")},
        "router": "mixer.gate",
        "router.correction_bias": "mixer.gate.e_score_correction_bias",
        **single_experts("mixer", "gate_proj", "up_proj", "down_proj"),
        **shared_expert("mixer.shared_experts"),
    },
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Nemotron-H. MTP layers are left out."""
    types = _layer_types(config)
    config = config.with_fields(num_hidden_layers=len(types))
    norm = NormSpec("rms", config.number("layer_norm_epsilon", 1e-5))
    mamba = _mamba(config, norm)
    mixers: dict[str, MixerSpec] = {"mamba": mamba}
    if "attention" in types:
        config.refuse("attention_bias", False)
        config.refuse("sliding_window")
        head_dim = config.integer("attention_head_dim", 128)  # as older configs call it
        mixers["attention"] = attention(config.with_defaults(num_key_value_heads=8, head_dim=head_dim))
    if "mlp" in types:
        size, bias = config.integer("intermediate_size", 21504), config.flag("mlp_bias", False)
        mixers["mlp"] = MlpSpec(size, config.activation("mlp_hidden_act", "relu2"), gated=False, bias=bias)
    if "moe" in types:
        mixers["moe"] = _experts(config)
    layers = tuple((ResidualBlockSpec(mixers[kind], norm),) for kind in types)
    longest = config.integer("max_position_embeddings", 4096)
    return _NAMES.describe(decoder(config, "nemotron_h", layers, norm, longest), mamba_refs(mamba, "mixer"))


def _layer_types(config: ConfigReader) -> list[str]:
    for name in ("layers_block_type", "layer_types"):
        types = config.raw(name)
        if types is not None:
            if not isinstance(types, list) or any(not isinstance(kind, str) or kind not in _TYPES for kind in types):
                raise config.error(name, f"a list of {', '.join(_TYPES)}")
            config.with_fields(**{name: len(types)}).num_layers(name)
            return [_TYPES[kind] for kind in types]
    pattern = config.raw("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or {*pattern} - _LETTERS.keys():
        raise config.error("hybrid_override_pattern", f"a text of {', '.join(_LETTERS)}, a letter for each layer")
    config.with_fields(hybrid_override_pattern=len(pattern)).num_layers("hybrid_override_pattern")
    return [_LETTERS[letter] for letter in pattern]


def _mamba(config: ConfigReader, norm: NormSpec) -> Mamba2Spec:
    config.refuse("mamba_hidden_act", "silu", "swish")
    heads, head_dim = config.integer("mamba_num_heads", 128), config.integer("mamba_head_dim", 64)
    return plain_mixer(config, heads, head_dim, config.integer("ssm_state_size", 128), norm)


def _experts(config: ConfigReader) -> ExpertsSpec:
    config.refuse("moe_latent_size")
    config.refuse("mlp_bias", False)
    config.refuse("n_shared_experts", 1)
    defaults = config.with_defaults(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688)
    experts = grouped_experts(defaults.with_fields(hidden_act=None, n_shared_experts=0))
    activation = config.activation("mlp_hidden_act", "relu2")
    shared = MlpSpec(config.integer("moe_shared_expert_intermediate_size", 7688), activation, gated=False)
    return replace(experts, activation=activation, shared=shared, gated=False)
