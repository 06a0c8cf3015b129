"""A decoder in JAX: pure functions from token ids to hidden states, and from those to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...models.spec import AttentionSpec, DecoderSpec
from .attention import Sequences
from .inputs import StepInputs
from .mixers import KINDS, Params, Parts, Pass, ResidualBlock


class TpuDecoder:
    """The functions of one model. What they compute with is passed to them: they keep nothing.

    `page_windows` has the window of each array of pages. Raises DeviceError for a kind of mixer that is not known.
    """

    def __init__(self, spec: DecoderSpec, mesh: Mesh, uses_kernel: Callable[[AttentionSpec], bool]) -> None:
        self._spec = spec
        self._windows = spec.windows()
        self.page_windows: list[int | None] = []
        parts = Parts(mesh, uses_kernel, self.page_windows, KINDS)
        self._residuals = [
            ResidualBlock(residual, f"layers.{index}", parts)
            for index, layer in enumerate(spec.layers)
            for residual in layer
        ]

    def hidden(
        self, params: Params, pages: Sequence[jax.Array], inputs: StepInputs
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The residual stream after all layers, `[T, hidden] float32`, and the pages with the tokens' K and V.

        A token's earlier positions must be in the pages or in the call.
        """
        rest = inputs.query_start, inputs.context_len, inputs.num_seqs
        step = Pass(
            params,
            list(pages),
            dict(zip(self._windows, inputs.slots, strict=True)),
            {
                window: Sequences(inputs.positions, inputs.sequence, table, *rest)
                for window, table in zip(self._windows, inputs.tables, strict=True)
            },
        )
        x = self._embed(step, inputs.token_ids, inputs.positions)
        for residual in self._residuals:
            x = residual(x, step)
        return x, step.pages

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """The logits `[R, vocab] float32` of hidden states `[R, hidden]`."""
        spec, step = self._spec, Pass(params, [], {}, {})
        x = step.norm("final_norm", spec.final_norm, x)
        if spec.embedding.size != spec.hidden_size:
            x = step.linear("embed.project_out", x)
        logits = step.linear("embed" if spec.head.tied else "head", x)
        if spec.head.bias and spec.head.tied:  # an untied head has added it
            logits = logits + params["head.bias"]
        logits = logits / spec.head.divisor
        return logits if spec.head.softcap is None else spec.head.softcap * jnp.tanh(logits / spec.head.softcap)

    def _embed(self, step: Pass, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        embedding = self._spec.embedding
        x = step.params["embed.weight"][token_ids].astype(jnp.float32) * embedding.scale
        if embedding.size != self._spec.hidden_size:
            x = step.linear("embed.project_in", x)
        if embedding.num_positions:
            x = x + step.params["embed.positions"][positions + embedding.position_offset].astype(jnp.float32)
        return step.norm("embed.norm", embedding.norm, x)
