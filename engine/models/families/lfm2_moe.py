"""LFM2 with experts (https://arxiv.org/abs/2511.23404): all layers but the first ones have them."""

from __future__ import annotations

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import ExpertsSpec, MlpSpec, RouterSpec
from .expert_parts import expert_count, experts_per_token, single_experts
from .lfm2 import described
from .listing import Listing

ARCHITECTURES = {"Lfm2MoeForCausalLM": Listing("LFM2 and LFM2.5, with experts")}

_MODULES = {
    "experts_norm": "ffn_norm",
    "router": "feed_forward.gate",
    "router.correction_bias": "feed_forward.expert_bias",
    **single_experts("feed_forward", "w1", "w3", "w2"),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """LFM2 with experts."""
    config = config.with_defaults(num_experts=32, num_experts_per_tok=4)
    count = expert_count(config, "num_experts")
    experts = ExpertsSpec(
        count,
        experts_per_token(config, count),
        config.integer("moe_intermediate_size", 1792),
        router=RouterSpec(
            "sigmoid",
            config.flag("norm_topk_prob", True),
            correction_bias=config.flag("use_expert_bias", True),
            scale=config.number("routed_scaling_factor", 1.0),
        ),
    )
    mlp = MlpSpec(config.integer("intermediate_size", 7168), "silu", gated=True)
    dense = 0 if config.raw("num_dense_layers") == 0 else config.integer("num_dense_layers", 2)
    mlps = [mlp if layer < dense else experts for layer in range(config.num_layers("num_hidden_layers"))]
    return described("lfm2_moe", config, mlps, max_model_len, _MODULES)
