"""A decoder whose launches have fixed shapes: from staged token ids to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...models.spec import DecoderSpec, LayerSpec
from ...weights.tensor import DenseTensor
from ..grouped_weights import GroupedMatrix
from .attention import Attend, PlanAttention
from .mixers import KINDS, Parts, ResidualBlock, Tokens
from .operations import Operations
from .weights import Weights

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
RunLayer = Callable[[Sequence[ResidualBlock], Tensor, Tokens], Tensor]


class GraphDecoder:
    """Weights, KV cache and the functions that become graphs. The mixers keep the K, V and states of tokens.

    `hidden [max_tokens + 1, hidden_size] float32` connects the layers of a launch and the head of a step. Each token of
    a launch writes the row that it was given. The last row is for tokens that are not asked for. `tokens [max_rows + 1]
    int32` are the tokens that the last step sampled. The next step may go on from them.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Iterable[tuple[str, DenseTensor | GroupedMatrix]],
        *,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        attend: Attend,
        plan_attention: PlanAttention,
        add_up: Callable[[Tensor], Tensor] | None = None,
        operations: Operations | None = None,
    ) -> None:
        self.windows = spec.windows()
        ropes = list(dict.fromkeys(a.rope for a in spec.attentions() if a.rope is not None))
        operations = operations or Operations()
        loaded = Weights(weights, dtype, device, operations)
        parts = Parts(
            loaded, self.windows, ropes, block_size, cache_dtype, device, attend, add_up, operations.rotate, KINDS
        )
        embedding, head = spec.embedding, spec.head
        self.hidden = torch.zeros((max_tokens + 1, spec.hidden_size), device=device)
        self.tokens = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.vocab_size = spec.vocab_size
        self._spec, self._plan_attention = spec, plan_attention
        self._block_size, self._num_blocks = block_size, [0] * len(self.windows)
        self._inv_freq = [torch.tensor(rope.inv_freq, device=device) for rope in ropes]
        self._factors = [rope.attention_factor for rope in ropes]
        self._embedding = loaded.table("embed.weight")
        self._positions = loaded["embed.positions"] if embedding.num_positions else None
        self._embedding_norm = loaded.norm("embed.norm", embedding.norm)
        projected = embedding.size != spec.hidden_size
        self._project_in = loaded.linear("embed.project_in") if projected else None
        self._project_out = loaded.linear("embed.project_out") if projected else None
        self._layers = [
            [ResidualBlock(residual, f"layers.{index}", parts) for residual in layer]
            for index, layer in enumerate(spec.layers)
        ]
        self._final_norm = loaded.norm("final_norm", spec.final_norm)
        self._head = loaded.linear("embed" if head.tied else "head", "head")

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make an empty KV cache of `num_blocks` blocks for each group; they include the one for padding."""
        self._num_blocks = list(num_blocks)
        for residual in chain(*self._layers):
            residual.mixer.allocate(num_blocks)

    def compiled_layers(self, compile_function: Compile) -> Mapping[LayerSpec, RunLayer]:
        """The compiled functions that run the layers. Layers that differ only in their weights share one."""
        return {layer: compile_function(_run_layer) for layer in dict.fromkeys(self._spec.layers)}

    def forward(
        self,
        staged: Tensor,
        num_sequences: int,
        query_len: int,
        width: int,
        layers: Mapping[LayerSpec, RunLayer] | None = None,
    ) -> None:
        """Write the tokens' K and V, and their hidden states before the final norm. `layers` run the layers, if given.

        `staged` are int32, one behind the other: token ids [S, Q], positions [S, Q], rows of `hidden` [S, Q], slots of
        each cache group [G, S, Q], block tables of each [G, S, W]. A negative token id `-1 - i` stands for `tokens[i]`.
        """
        S, Q, G = num_sequences, query_len, len(self.windows)
        ids = staged.long()
        token_ids, positions, rows = ids[: 3 * S * Q].view(3, S, Q).unbind()
        slots = ids[3 * S * Q : (3 + G) * S * Q].view(G, S, Q)
        tables = ids[(3 + G) * S * Q :].view(G, S, width)
        # Where nothing could be sampled there is no token, and its sequence does not go on.
        sampled = self.tokens[(-1 - token_ids).clamp(min=0)].clamp(min=0).long()
        plans = [
            self._plan_attention(positions, table, self._block_size, num_blocks, window)
            for table, num_blocks, window in zip(tables, self._num_blocks, self.windows, strict=True)
        ]
        tokens = Tokens(positions, slots, tables, plans, self._rotations(positions))
        x = self._embed(torch.where(token_ids < 0, sampled, token_ids), positions)
        for spec, layer in zip(self._spec.layers, self._layers, strict=True):
            run_layer = _run_layer if layers is None else layers[spec]
            x = run_layer(layer, x, tokens)
        self.hidden.index_put_((rows.flatten(),), x.flatten(0, 1))

    def logits(self, rows: Tensor) -> Tensor:
        """The logits after the tokens whose hidden states are in `rows [R] int32`, `[R, vocab] float32`."""
        head = self._spec.head
        x = self._final_norm(self.hidden[rows.long()])
        if self._project_out is not None:
            x = self._project_out(x)
        logits = self._head(x).float() / head.divisor
        return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)

    def copy_slots(self, source: Tensor, target: Tensor, group: int) -> None:
        """Copy K and V in all layers of a cache group, from the slots `source [N]` to `target [N]`."""
        for residual in chain(*self._layers):
            residual.mixer.copy_slots(source, target, group)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedding = self._spec.embedding
        x = self._embedding(token_ids).float() * embedding.scale
        if self._project_in is not None:
            x = self._project_in(x).float()
        if self._positions is not None:
            x = x + self._positions[positions + embedding.position_offset].float()
        return self._embedding_norm(x)

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        rotations = []
        for inv_freq, factor in zip(self._inv_freq, self._factors, strict=True):
            angles = positions.float()[:, :, None] * inv_freq
            rotations.append((angles.cos() * factor, angles.sin() * factor))
        return rotations


def _run_layer(layer: Sequence[ResidualBlock], x: Tensor, tokens: Tokens) -> Tensor:
    for residual in layer:
        x = residual(x, tokens)
    return x
