"""DeepSeek V2 (https://arxiv.org/abs/2405.04434), V3 (https://arxiv.org/abs/2412.19437), and GLM-4.7-Flash.

Attention to latents; a dense MLP in the first layers, experts in the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import ExpertsSpec, MlpSpec, NormSpec, RouterSpec
from .deepseek_experts import DEEPSEEK_EXPERTS, dense_layers_first, grouped_experts
from .expert_parts import EXPERT_NORMS, expert_count, expert_groups, expert_layers, experts_per_token
from .latent_parts import LATENT_NAMES, latent_attention, latent_refs
from .listing import Listing
from .mtp_parts import later_layer_mtp
from .names import llama_names
from .parts import decoder, gated_mlp, uniform_layers

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Listing("DeepSeek V2", refused="`norm_topk_prob`; biases of MLPs"),
    "DeepseekV3ForCausalLM": Listing("DeepSeek V3 and R1, Kimi K2, text only"),
    "Glm4MoeLiteForCausalLM": Listing("GLM-4.7-Flash"),
}

_NAMES = llama_names({**EXPERT_NORMS, **DEEPSEEK_EXPERTS, **LATENT_NAMES})
_FAMILIES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
}
# What a config means that does not say.
_EXPERTS: dict[str, dict[str, object]] = {
    "deepseek_v2": {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2},
    "deepseek_v3": {
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {
        "n_routed_experts": 64,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
}
_DENSE_LAYERS = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe_lite": 1}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """One of these models. A layer for drafts may lie behind the others."""
    family = _FAMILIES[architecture]
    config = config.with_defaults(**_EXPERTS[family])
    if family == "glm4_moe_lite" and "q_lora_rank" not in config:
        config = config.with_fields(q_lora_rank=768)
    interleaved = family == "deepseek_v2" or config.flag("rope_interleave", True)
    mixer, rope = latent_attention(config, max_model_len, interleaved=interleaved)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5 if family == "glm4_moe_lite" else 1e-6))
    experts = _greedy_experts(config) if family == "deepseek_v2" else grouped_experts(config)
    layers = expert_layers(
        [mixer] * uniform_layers(config),
        experts,
        norm,
        gated_mlp(config),
        _has_experts(config, family),
    )
    refs = latent_refs(mixer)
    if family == "deepseek_v3":
        config = config.with_defaults(num_nextn_predict_layers=1)
    mtp = later_layer_mtp(config, _NAMES, norm, expert_layers([mixer], experts, norm)[0], refs)
    return replace(_NAMES.describe(decoder(config, family, layers, norm, rope.max_positions), refs), mtp=mtp)


def _has_experts(config: ConfigReader, family: str) -> Callable[[int], bool]:
    types = config.raw("mlp_layer_types") if family == "glm4_moe_lite" else None
    if types is None:
        return dense_layers_first(config, _DENSE_LAYERS[family])
    count = config.num_layers("num_hidden_layers")
    if not isinstance(types, list) or len(types) != count or any(kind not in ("dense", "sparse") for kind in types):
        raise config.error("mlp_layer_types", f"a list of {count} entries, each dense or sparse")
    return lambda layer: types[layer] == "sparse"


def _greedy_experts(config: ConfigReader) -> ExpertsSpec:
    """Experts whose router takes the softmax, and perhaps chooses from the best groups, each as good as its best."""
    config.refuse("norm_topk_prob", False)
    config.refuse("mlp_bias", False)
    method = config.raw("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise config.error("topk_method", "greedy or group_limited_greedy")
    num_experts = expert_count(config, "n_routed_experts")
    num_groups, kept_groups = expert_groups(config, num_experts) if method == "group_limited_greedy" else (1, 1)
    activation, size = config.activation("hidden_act", "silu"), config.integer("moe_intermediate_size")
    num_shared = 0 if config.raw("n_shared_experts") == 0 else config.integer("n_shared_experts")
    return ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts // num_groups * kept_groups),
        size,
        activation,
        router=RouterSpec(
            "softmax",
            normalize=False,
            num_groups=num_groups,
            kept_groups=kept_groups,
            scale=config.number("routed_scaling_factor", 1.0),
        ),
        shared=MlpSpec(size * num_shared, activation, gated=True) if num_shared else None,
    )
