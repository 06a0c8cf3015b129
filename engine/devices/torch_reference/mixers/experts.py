"""Experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import ExpertsSpec, RouterSpec
from .mixer import Parts, Tokens
from .mlp import Mlp, activate

_SWIGLU_ALPHA = 1.702


class Experts:
    """Routed experts, and a shared one. They remember nothing."""

    def __init__(self, spec: ExpertsSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights
        self._shared = Mlp(spec.shared, f"{layer}.shared", parts) if spec.shared else None

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The chosen experts' outputs for `x [T, hidden]`, weighted and summed in the order of their numbers."""
        spec = self._spec
        weights = route(
            spec,
            self._logits(x),
            self._weights.get(f"{self._layer}.router.correction_bias"),
            self._weights.get(f"{self._layer}.router.expert_scales"),
        )
        x = self._weights.norm(f"{self._layer}.experts_input_norm", spec.input_norm, x)
        total = torch.zeros_like(x)
        for expert in weights.any(0).nonzero().flatten().tolist():
            rows = weights[:, expert].nonzero().flatten()
            weight = weights[rows, expert, None]
            with self._weights.loras.only(rows):
                if spec.weighs_input:
                    total[rows] += self._expert(expert, weight * x[rows])
                else:
                    total[rows] += weight * self._expert(expert, x[rows])
        if self._shared is not None:
            shared = self._shared(x, tokens)
            if spec.shared_gate:
                shared = self._exact(f"{self._layer}.shared_gate", x).sigmoid() * shared
            total = total + shared
        return total + self._weights[f"{self._layer}.experts.bias"] if spec.sum_bias else total

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy."""

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy."""

    def _logits(self, x: Tensor) -> Tensor:
        """`[T, experts]`."""
        name, router = f"{self._layer}.router", self._spec.router
        return self._exact(name, self._weights.norm(f"{name}_norm", router.norm, x) * router.input_scale)

    def _exact(self, name: str, x: Tensor) -> Tensor:
        """The product with a matrix, and what adapters add, always in float32."""
        y = functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))
        return self._weights.loras.add(name, x, y)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        name, limit = f"{self._layer}.experts.{expert}", self._spec.swiglu_limit
        up = self._weights.linear(f"{name}.up", x)
        if not self._spec.gated:
            return self._weights.linear(f"{name}.down", activate(self._spec.activation, up))
        gate = self._weights.linear(f"{name}.gate", x)
        if limit is None:
            inner = activate(self._spec.activation, gate) * up
        else:
            gate = gate.clamp(max=limit)
            inner = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(_SWIGLU_ALPHA * gate)
        return self._weights.linear(f"{name}.down", inner)


def route(
    spec: ExpertsSpec, logits: Tensor, correction_bias: Tensor | None, expert_scales: Tensor | None = None
) -> Tensor:
    """The weights of all experts, 0 for those that are not chosen. `logits [T, experts]`, and so the result."""
    router = spec.router
    if router.scores == "sparse_mixer":
        weights = _mixed(spec.experts_per_token, router.jitter, logits) * router.scale
        return weights if expert_scales is None else weights * expert_scales
    scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if router.num_groups > 1:
        choice = choice.masked_fill(~_kept(router, choice), -torch.inf)
    # torch.topk does not say which of equal ones it takes.
    chosen = choice.sort(stable=True, dim=-1, descending=True).indices[:, : spec.experts_per_token]
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    if router.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weights = weights * router.scale
    return weights if expert_scales is None else weights * expert_scales


def _mixed(count: int, jitter: float, logits: Tensor) -> Tensor:
    """The weights of a sparse mixer, which chooses one expert after the other."""
    left, weights = logits, torch.zeros_like(logits)
    for _ in range(count):
        chosen = left.sort(stable=True, dim=-1, descending=True).indices[:, :1]
        best = left.gather(1, chosen)
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        weights = weights.scatter(1, chosen, left.masked_fill(far, -torch.inf).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return weights


def _kept(router: RouterSpec, choice: Tensor) -> Tensor:
    """Which experts are in the best groups."""
    groups = choice.view(len(choice), router.num_groups, -1)
    best = groups.amax(-1) if router.group_score == "best" else groups.topk(2, -1).values.sum(-1)
    order = best.sort(stable=True, dim=-1, descending=True).indices[:, : router.kept_groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, order, True)
    return kept[..., None].expand_as(groups).reshape(choice.shape)
