"""Experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ....models.spec import ExpertsSpec, RouterSpec
from ..grouped import Grouped
from ..loras import ExpertUpdate
from ..mesh import AXIS, weight_sharding
from ..products import ragged
from .mixer import Parts, Pass
from .mlp import Mlp, activate

_SWIGLU_ALPHA = 1.702


class ExpertAdapters(NamedTuple):
    """What adapters change of a layer's experts: `chosen [N, slots]` is 1 in the slot of a row, `updates` are by stack.

    The ranks of all slots lie side by side: what belongs to another slot than a row's is multiplied by 0.
    """

    chosen: Any
    updates: dict[str, ExpertUpdate]

    def added(self, name: str, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """What is added to the product of `x [N, inputs]`, whose rows are in the order of experts, with a stack."""
        a, b = self.updates[name]
        count, inputs, slots, rank = a.shape
        between = ragged(x, a.reshape(count, inputs, -1), sizes).reshape(-1, slots, rank)
        between *= self.chosen[:, :, None]
        return ragged(between.reshape(len(x), -1), b.reshape(count, slots * rank, -1), sizes)


class Experts:
    """Routed experts, whose matrices are stacks `[experts, inputs, outputs]`, and a shared one.

    Each chip has a part of every expert's inner width, as of an MLP's.
    """

    def __init__(self, spec: ExpertsSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._mesh = spec, layer, parts.mesh
        self._is_divided = spec.intermediate_size % parts.mesh.size == 0
        self._shared = Mlp(spec.shared, f"{layer}.shared", parts) if spec.shared else None

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The chosen experts' outputs for `x [T, hidden]`, weighted and summed."""
        spec = self._spec
        chosen, weights = self._route(x, step)
        x = step.norm(f"{self._layer}.experts_input_norm", spec.input_norm, x)
        total = self._chosen(x, chosen, weights, step)
        if self._shared is not None:
            shared = self._shared(x, step)
            if spec.shared_gate:
                shared = jax.nn.sigmoid(step.linear(f"{self._layer}.shared_gate", x)) * shared
            total += shared
        return total

    def _route(self, x: jax.Array, step: Pass) -> tuple[jax.Array, jax.Array]:
        """The experts of each token and their weights, both `[T, experts_per_token]`."""
        name, router = f"{self._layer}.router", self._spec.router
        logits = step.linear(name, step.norm(f"{name}_norm", router.norm, x) * router.input_scale)
        chosen, weights = route(
            router, self._spec.experts_per_token, logits, step.params.get(f"{name}.correction_bias")
        )
        weights *= router.scale
        if router.expert_scales:
            weights *= step.params[f"{name}.expert_scales"][chosen]
        return chosen, weights

    def _chosen(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, step: Pass) -> jax.Array:
        """The sum of what the chosen experts give, `[T, hidden]`: each computes its tokens, one behind the other."""
        spec = self._spec
        T, K = chosen.shape
        # Padding has no expert, so that no matrix is read for it alone.
        is_token = jnp.arange(T) < step.tokens.query_start[-1]
        expert = jnp.where(is_token[:, None], chosen, spec.num_experts).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        expert, weight = expert[order], weights.reshape(-1)[order, None]
        rows = x[order // K]
        prefix = f"{self._layer}.experts."
        tensors = {name.removeprefix(prefix): array for name, array in step.params.items() if name.startswith(prefix)}
        shardings = {
            name: array.partitions()
            if isinstance(array, Grouped)
            else weight_sharding(self._mesh, prefix + name, array.shape).spec
            for name, array in tensors.items()
        }
        everywhere = PartitionSpec()
        adapters: ExpertAdapters | None = None
        divided: Any = everywhere
        if step.adapters is not None and (updates := step.adapters.of_experts(prefix)):
            adapters = ExpertAdapters(step.adapters.chosen[order // K], updates)
            divided = ExpertAdapters(everywhere, {name: self._divided(name) for name in updates})
        result = jax.shard_map(
            self._on_chip,
            mesh=self._mesh,
            in_specs=(everywhere, everywhere, shardings, divided),
            out_specs=everywhere,
            check_vma=False,
        )(rows * weight if spec.weighs_input else rows, expert, tensors, adapters)
        result = result if spec.weighs_input else result * weight
        result = jnp.where(expert[:, None] < spec.num_experts, result, 0.0)
        return result[jnp.argsort(order)].reshape(T, K, -1).sum(1)

    def _divided(self, name: str) -> ExpertUpdate:
        """What a chip takes of a stack's updates: the inner width, as of the stack."""
        if not self._is_divided:
            return ExpertUpdate(PartitionSpec(), PartitionSpec())
        if name == "down":
            return ExpertUpdate(PartitionSpec(None, AXIS), PartitionSpec())
        return ExpertUpdate(PartitionSpec(), PartitionSpec(None, None, None, AXIS))

    def _on_chip(
        self, x: jax.Array, expert: jax.Array, tensors: Mapping[str, jax.Array], adapters: ExpertAdapters | None
    ) -> jax.Array:
        """What experts give for `x [N, hidden]`, of which row i is for `expert[i]`, in ascending order."""
        spec = self._spec
        product = partial(_product, tensors, adapters, expert, jnp.bincount(expert, length=spec.num_experts))
        up = product("up", x)
        if not spec.gated:
            inner = activate(spec.activation, up)
        elif (limit := spec.swiglu_limit) is None:
            inner = activate(spec.activation, product("gate", x)) * up
        else:
            gate = jnp.minimum(product("gate", x), limit)
            inner = (jnp.clip(up, -limit, limit) + 1) * gate * jax.nn.sigmoid(_SWIGLU_ALPHA * gate)
        if not self._is_divided:
            return product("down", inner)
        # Each chip adds its part of the bias.
        return lax.psum(product("down", inner, self._mesh.size), AXIS)


def _product(
    tensors: Mapping[str, jax.Array],
    adapters: ExpertAdapters | None,
    expert: jax.Array,
    sizes: jax.Array,
    name: str,
    x: jax.Array,
    parts: int = 1,
) -> jax.Array:
    """Each row of `x [N, inputs]` with the matrix of its expert, and one of `parts` of the bias, `[N, outputs]`."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    if isinstance(weight, Grouped):
        y = weight.multiply_stack(x, expert, sizes)
    else:
        y = ragged(x, weight, sizes)
    if adapters is not None:
        y += adapters.added(name, x, sizes)
    return y if bias is None else y + bias[jnp.minimum(expert, len(bias) - 1)] / parts


def route(
    router: RouterSpec, count: int, logits: jax.Array, correction_bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The `count` experts of each token by their logits `[T, experts]`, and their weights, both `[T, count]`.

    Of equally good ones the first are chosen, as `top_k` does.
    """
    if router.scores == "sparse_mixer":
        return _mixed(count, router.jitter, logits)
    scores = jax.nn.softmax(logits, -1) if router.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction_bias is None else scores + correction_bias
    if router.num_groups > 1:
        choice = jnp.where(_kept(router, choice), choice, -jnp.inf)
    chosen = lax.top_k(choice, count)[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    if router.normalize:
        weights /= jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return chosen, weights


def _mixed(count: int, jitter: float, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Those of a sparse mixer, which chooses one expert after the other."""
    left, found = logits, []
    for _ in range(count):
        best, chosen = lax.top_k(left, 1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), -1)
        found.append((chosen, jnp.take_along_axis(shares, chosen, -1)))
        left = jnp.where(jnp.arange(logits.shape[-1]) == chosen, -jnp.inf, left)
    chosen, weights = (jnp.concatenate(parts, -1) for parts in zip(*found, strict=True))
    return chosen, weights


def _kept(router: RouterSpec, choice: jax.Array) -> jax.Array:
    """Which experts are in the best groups."""
    groups = choice.reshape(len(choice), router.num_groups, -1)
    best = groups.max(-1) if router.group_score == "best" else lax.top_k(groups, 2)[0].sum(-1)
    kept = lax.top_k(best, router.kept_groups)[1]
    is_kept = (jnp.arange(router.num_groups) == kept[..., None]).any(1)
    return jnp.repeat(is_kept, groups.shape[-1], axis=1)
