"""A decoder in JAX: pure functions from token ids to hidden states, and from those to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...models.spec import AttentionSpec, DecoderSpec
from ...weights.lora import HEAD
from .attention import Sequences
from .cache import Kept
from .inputs import StepInputs
from .loras import Adapters
from .mixers import KINDS, Params, Parts, Pass, ResidualBlock
from .mixers.alt_up import narrowed, widened


class TpuDecoder:
    """The functions of one model. What they compute with is passed to them: they keep nothing.

    `kept` is what the mixers keep in the arrays of the cache. Raises DeviceError for a kind of mixer that is not known.
    """

    def __init__(self, spec: DecoderSpec, mesh: Mesh, uses_kernel: Callable[[AttentionSpec], bool]) -> None:
        self._spec = spec
        self._windows = spec.windows()
        parts = Parts(mesh, uses_kernel, KINDS)
        self._residuals = [
            ResidualBlock(residual, f"layers.{index}", parts)
            for index, layer in enumerate(spec.layers)
            for residual in layer
        ]
        self.kept: list[Kept] = parts.kept

    def hidden(
        self, params: Params, cache: Sequence[jax.Array], inputs: StepInputs, adapters: Adapters | None = None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The residual stream after all layers, `[T, hidden] float32`, and the cache with what the tokens leave.

        A token's earlier positions must be in the cache or in the call.
        """
        rest = inputs.query_start, inputs.context_len, inputs.num_seqs
        step = Pass(
            params,
            list(cache),
            inputs,
            dict(zip(self._windows, inputs.slots, strict=True)),
            {
                window: Sequences(inputs.positions, inputs.sequence, table, *rest)
                for window, table in zip(self._windows, inputs.tables, strict=True)
            },
            adapters,
        )
        x = self._embed(step, inputs.token_ids, inputs.positions)
        step.per_layer = self._per_layer(step, inputs.token_ids, x)
        streams = self._spec.streams
        if streams:
            x = widened(streams, x, step)
        for residual in self._residuals:
            x = residual(x, step)
        return narrowed(streams, x, step) if streams else x, step.cache

    def logits(self, params: Params, x: jax.Array, adapters: Adapters | None = None) -> jax.Array:
        """The logits `[R, vocab] float32` of hidden states `[R, hidden]`."""
        spec, step = self._spec, Pass(params, [], None, {}, {}, adapters)
        x = step.norm("final_norm", spec.final_norm, x)
        if spec.embedding.size != spec.hidden_size:
            x = step.linear("embed.project_out", x)
        logits = step.product("embed" if spec.head.tied else "head", x)
        if adapters is not None:
            logits = adapters.add(HEAD, x, logits)
        if spec.head.bias:
            logits = logits + params["head.bias"]
        logits = logits / spec.head.divisor
        return logits if spec.head.softcap is None else spec.head.softcap * jnp.tanh(logits / spec.head.softcap)

    def _embed(self, step: Pass, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        embedding = self._spec.embedding
        x = step.rows("embed.weight", token_ids)
        if step.adapters is not None:
            x = step.adapters.embedded(token_ids, x)
        x = x * embedding.scale
        if embedding.size != self._spec.hidden_size:
            x = step.linear("embed.project_in", x)
        if embedding.num_positions:
            x = x + step.params["embed.positions"][positions + embedding.position_offset].astype(jnp.float32)
        return step.norm("embed.norm", embedding.norm, x)

    def _per_layer(self, step: Pass, token_ids: jax.Array, x: jax.Array) -> jax.Array | None:
        """The input that each layer gets for tokens with the embeddings `x [T, hidden]`: `[T, layers, size]`."""
        per_layer = self._spec.embedding.per_layer
        if per_layer is None:
            return None
        shape = len(token_ids), len(self._spec.layers), per_layer.size
        projected = step.linear("embed.per_layer_projection", x) * per_layer.projection_scale
        projected = step.norm("embed.per_layer_norm", per_layer.norm, projected.reshape(shape))
        rows = jnp.where(token_ids < per_layer.vocab_size, token_ids, 0)
        looked_up = step.rows("embed.per_layer", rows).reshape(shape) * per_layer.scale
        return (projected + looked_up) * per_layer.sum_scale
