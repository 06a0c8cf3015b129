"""A mixture of experts (https://arxiv.org/abs/1701.06538): MLPs; a router chooses a few of them for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from ...declaring.record import record
from .mlp import Activation, MlpSpec
from .norm import NormSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class RouterSpec:
    """Which experts compute a token, and what their results count.

    Logits are `x W^T`, plus a `bias`, in float32. The `scores` are the softmax over all experts, or the sigmoid of each
    logit. Experts with the highest scores are chosen, of equal ones those with lower numbers. With a `correction_bias`,
    scores plus that bias choose, and the scores alone count (https://arxiv.org/abs/2408.15664).

    With groups, the experts of the `kept_groups` best of `num_groups` can be chosen (https://arxiv.org/abs/2405.04434).
    A group is as good as its best expert, or as the sum of its `best_two`.

    The weight of an expert is its score. With `normalize`, that is divided by the sum of those chosen; of a softmax,
    that is the softmax over the chosen logits. Then it is multiplied by `scale`, and with `expert_scales` by a number
    that the checkpoint has for each expert.

    With "sparse_mixer" as `scores` (https://arxiv.org/abs/2409.12136), experts are chosen one after the other, each
    time the one with the highest logit of those that are left. Its weight is its share of the softmax over those left
    whose logits are near: `(best - logit) / max(|logit|, best)` is at most `2 * jitter`.

    With a `norm`, the router reads `input_scale * norm(x)` instead of x.

    Raises ValueError for numbers that make no router.
    """

    scores: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    normalize: bool = True
    bias: bool = False
    correction_bias: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    scale: float = 1.0
    norm: NormSpec | None = None
    input_scale: float = 1.0
    expert_scales: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.kept_groups <= self.num_groups:
            raise ValueError(f"of {self.num_groups} groups of experts, {self.kept_groups} cannot be kept")
        if self.scale <= 0:
            raise ValueError("the scale of experts' weights must be above 0")
        if self.scores == "sparse_mixer" and (self.normalize or self.correction_bias or self.num_groups > 1):
            raise ValueError("a sparse mixer's weights are not normalized, and it has neither a correction nor groups")
        if self.jitter < 0:
            raise ValueError("the jitter of a router must not be negative")
        if self.input_scale <= 0 or (self.input_scale != 1 and self.norm is None):
            raise ValueError("the scale of what a router reads must be above 0, and goes with a norm")


@record(frozen=True, slots=True)
class ExpertsSpec:
    """The sum of `weight * expert(x)` over the chosen experts in ascending order, then of the `shared` expert's result.

    With a `sum_bias`, which only towers may have, a bias is a part of the sum, whatever experts weigh.

    An expert is an MLP, `gated` or plain: `down(act(gate(x)) * up(x))` or `down(act(up(x)))`. With a `swiglu_limit` it
    is gpt-oss's: `down((clip(up(x)) + 1) * g * sigmoid(1.702 g))`, where g is `min(gate(x), limit)` and up is clipped
    to `[-limit, limit]` (https://arxiv.org/abs/2508.10925).

    With `weighs_input`, `expert(weight * x)` is summed instead. The `shared` expert, an MLP of the same form without
    bias, computes every token; with a `shared_gate`, its result is multiplied by the sigmoid of `x . gate`.

    With an `input_norm`, experts read the norm of x, and the router still reads x.

    Each expert's matrices are weights of their own: `experts.7.gate.weight`.

    Raises ValueError for numbers that do not fit together.
    """

    kind: ClassVar[str] = "experts"

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    swiglu_limit: float | None = None
    weighs_input: bool = False
    router: RouterSpec = RouterSpec()
    shared: MlpSpec | None = None
    shared_gate: bool = False
    gated: bool = True
    input_norm: NormSpec | None = None
    sum_bias: bool = False

    def __post_init__(self) -> None:
        router = self.router
        if self.num_experts % router.num_groups:
            raise ValueError(f"{self.num_experts} experts are not {router.num_groups} groups of equal size")
        group = self.num_experts // router.num_groups
        if not 0 < self.experts_per_token <= router.kept_groups * group:
            raise ValueError(
                f"of {router.kept_groups * group} experts, {self.experts_per_token} for each token cannot be chosen"
            )
        if router.num_groups > 1 and router.group_score == "best_two" and group < 2:
            raise ValueError("a group of one expert has no best two")
        if self.swiglu_limit is not None and (self.swiglu_limit <= 0 or self.activation != "silu" or not self.gated):
            raise ValueError("the limit of SwiGLU must be above 0, and is for silu with a gate")
        if (
            self.shared is not None
            and replace(self.shared, gated=self.gated, gate_scale=1.0, bias=False) != self.shared
        ):
            raise ValueError("the shared expert is gated as the others are, without a scale, and has no bias")
        if self.shared_gate and self.shared is None:
            raise ValueError("a gate of the shared expert needs one")
        if self.weighs_input and self.bias:
            raise ValueError("experts whose input is weighed have no bias")
        if self.input_norm is not None and (router.norm is None or self.shared is not None):
            raise ValueError("experts with a norm of their own have a router with one, and no shared expert")

    @property
    def activations(self) -> int:
        """How many values a token takes: logits, what the experts read, and what is between their matrices."""
        shared = self.shared.intermediate_size if self.shared else 0
        return self.num_experts + self.experts_per_token * self.intermediate_size + shared

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights of the router, of each expert, and of the shared expert."""
        shapes = under("router", linear(self.num_experts, hidden_size, self.router.bias))
        if self.router.norm:
            shapes |= under("router_norm", self.router.norm.shapes(hidden_size))
        if self.router.expert_scales:
            shapes["router.expert_scales"] = (self.num_experts,)
        if self.input_norm:
            shapes |= under("experts_input_norm", self.input_norm.shapes(hidden_size))
        if self.sum_bias:
            shapes["experts.bias"] = (hidden_size,)
        if self.router.correction_bias:
            shapes["router.correction_bias"] = (self.num_experts,)
        expert = MlpSpec(self.intermediate_size, self.activation, self.gated, self.bias).shapes(hidden_size)
        for number in range(self.num_experts):
            shapes |= under(f"experts.{number}", expert)
        if self.shared:
            shapes |= under("shared", self.shared.shapes(hidden_size))
        if self.shared_gate:
            shapes |= under("shared_gate", linear(1, hidden_size, bias=False))
        return shapes
