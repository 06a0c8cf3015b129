"""A decoder in torch: from token ids to logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.spec import DecoderSpec
from ...weights.dtypes import DType
from ...weights.tensor import WeightTensor
from .mixers import KINDS, Parts, ResidualBlock, Tokens
from .mixers.alt_up import narrowed, widened
from .weights import DTYPES, Weights


class TorchDecoder:
    """Weights, KV cache and the forward pass. What tokens leave behind is kept in the mixers."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Iterable[tuple[str, WeightTensor]],
        dtype: DType,
        kv_cache_dtype: DType,
        num_blocks: Sequence[int],
        block_size: int,
        num_states: int,
        lora_dtype: DType = "float32",
    ) -> None:
        self._spec = spec
        self._weights = Weights(weights, DTYPES[dtype], DTYPES[lora_dtype])
        self.loras = self._weights.loras
        blocks = dict(zip(spec.windows(), num_blocks, strict=True))
        self._windows = list(blocks)
        parts = Parts(self._weights, blocks, block_size, num_states, DTYPES[kv_cache_dtype], KINDS)
        self._layers = [
            [ResidualBlock(residual, f"layers.{index}", parts) for residual in layer]
            for index, layer in enumerate(spec.layers)
        ]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        block_tables: Sequence[NDArray[np.int32]],
        logits_rows: NDArray[np.int32],
        state_slots: NDArray[np.int32] | None = None,
        adapters: NDArray[np.int32] | None = None,
        *,
        media: tuple[NDArray[np.int32], NDArray[np.float32], Sequence[int]] | None = None,
        rope_positions: NDArray[np.int32] | None = None,
        visible_until: NDArray[np.int32] | None = None,
    ) -> NDArray[np.float32]:
        """The logits after the tokens in `logits_rows`, shape [R, vocab]. Writes the tokens' K and V first.

        `token_ids [T]`, `positions [T]`, and for each cache group `block_tables [T, max_blocks]` with each token's own
        row. `state_slots [T]` are the slots of recurrent state, if the model has any, and `adapters [T]` the numbers of
        adapters, -1 for none. `media` are places `[N]` in T, their rows `[N, (1 + layers) * hidden]`, and the numbers
        of these layers. The rest is as in StepBatch: `rope_positions [axes, T]`, `visible_until [T]`. What a token sees
        must be in the cache or in the call.
        """
        self.loras.of_tokens = None if adapters is None else _indices(adapters)
        tables = map(_indices, block_tables)
        ids, places = _indices(token_ids), _indices(positions)
        x = self._embed(ids, places)
        added: list[tuple[int, Tensor]] = []
        if media is not None:
            in_place, parts = _indices(media[0]), torch.from_numpy(media[1])
            x[in_place], *others = torch.split(parts, self._spec.hidden_size, dim=1)
            added = [*zip(media[2], others, strict=True)]
            ids[in_place] = 0
        tokens = Tokens(
            places,
            self.loras.rope_positions(places),
            None if state_slots is None else _indices(state_slots),
            dict(zip(self._windows, tables, strict=True)),
            self._per_layer(ids, x),
            None if rope_positions is None else self.loras.rope_positions(_indices(rope_positions)),
            None if visible_until is None else _indices(visible_until),
        )
        if streams := self._spec.streams:
            x = widened(streams, self._weights, x)
        for index, layer in enumerate(self._layers):
            for residual in layer:
                x = residual(x, tokens)
            for after, part in added:
                if after == index:
                    x[in_place] += part
        rows = _indices(logits_rows)
        x = x[rows]
        if self.loras.of_tokens is not None:
            self.loras.of_tokens = self.loras.of_tokens[rows]
        return self._logits(narrowed(streams, self._weights, x) if streams else x).numpy()

    @torch.inference_mode()
    def copy_blocks(self, pairs: NDArray[np.int32], group: int) -> None:
        """Copy KV blocks in all layers of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        source, target = _indices(pairs).unbind(1)
        for residual in chain(*self._layers):
            residual.mixer.copy_blocks(source, target, self._windows[group])

    @torch.inference_mode()
    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy recurrent state in all layers, `pairs[i] = (from, to)`, shape [N, 2], one after the other."""
        for source, target in pairs.tolist():
            for residual in chain(*self._layers):
                residual.mixer.copy_state(source, target)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedding = self._spec.embedding
        x = self.loras.embed(token_ids, self._weights["embed.weight"][token_ids]) * embedding.scale
        if embedding.size != self._spec.hidden_size:
            x = self._weights.linear("embed.project_in", x)
        if embedding.num_positions:
            x = x + self._weights["embed.positions"][positions + embedding.position_offset]
        return self._weights.norm("embed.norm", embedding.norm, x)

    def _per_layer(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """The input that each layer gets for tokens with the embeddings `x [T, hidden]`: `[T, layers, size]`."""
        per_layer = self._spec.embedding.per_layer
        if per_layer is None:
            return None
        shape = (len(token_ids), len(self._spec.layers), per_layer.size)
        projected = self._weights.linear("embed.per_layer_projection", x) * per_layer.projection_scale
        projected = self._weights.norm("embed.per_layer_norm", per_layer.norm, projected.view(shape))
        rows = torch.where(token_ids < per_layer.vocab_size, token_ids, 0)
        looked_up = self._weights["embed.per_layer"][rows].view(shape) * per_layer.scale
        return (projected + looked_up) * per_layer.sum_scale

    def _logits(self, x: Tensor) -> Tensor:
        head = self._spec.head
        x = self._weights.norm("final_norm", self._spec.final_norm, x)
        if self._spec.embedding.size != self._spec.hidden_size:
            x = self._weights.linear("embed.project_out", x)
        logits = self.loras.logits(x, self._weights.product("embed" if head.tied else "head", x))
        if head.bias:
            logits = logits + self._weights["head.bias"]
        logits = logits / head.divisor
        return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _indices(array: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
