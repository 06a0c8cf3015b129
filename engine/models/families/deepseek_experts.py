"""DeepSeek V3's experts (https://arxiv.org/abs/2412.19437), which other families have too."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ConfigReader
from ..spec import ExpertsSpec, MlpSpec, RouterSpec
from .expert_parts import QWEN_EXPERTS, expert_count, expert_groups, experts_per_token, shared_expert

DEEPSEEK_EXPERTS = {
    **QWEN_EXPERTS,
    **shared_expert("mlp.shared_experts"),
    "router.correction_bias": "mlp.gate.e_score_correction_bias",
}
"""The names in checkpoints."""


def grouped_experts(config: ConfigReader) -> ExpertsSpec:
    """Experts whose router takes sigmoids and a correction bias, and chooses from the best groups.

    The shared expert is as wide as `n_shared_experts`. Raises ModelError for numbers that do not fit together.
    """
    activation, size = config.activation("hidden_act", "silu"), config.integer("moe_intermediate_size")
    num_experts = expert_count(config, "n_routed_experts", "num_local_experts", "num_experts")
    num_groups, kept_groups = expert_groups(config, num_experts)
    num_shared = 0 if config.raw("n_shared_experts") == 0 else config.integer("n_shared_experts", 1)
    return ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts // num_groups * kept_groups),
        size,
        activation,
        router=RouterSpec(
            "sigmoid",
            config.flag("norm_topk_prob", True),
            correction_bias=True,
            num_groups=num_groups,
            kept_groups=kept_groups,
            group_score="best_two",
            scale=config.number("routed_scaling_factor", 1.0),
        ),
        shared=MlpSpec(size * num_shared, activation, gated=True) if num_shared else None,
    )


def dense_layers_first(config: ConfigReader, default: int) -> Callable[[int], bool]:
    """Which layers have experts: those from `first_k_dense_replace` on."""
    first = config.raw("first_k_dense_replace")
    first = default if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.error("first_k_dense_replace", "an integer of at least 0")
    return lambda layer: layer >= first
