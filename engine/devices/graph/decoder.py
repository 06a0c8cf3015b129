"""A decoder whose launches have fixed shapes: from staged token ids to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, RopeSpec, mixers, tensor_shapes
from ...weights.lora import EMBED, HEAD
from ...weights.tensor import DenseTensor
from ..grouped_weights import GroupedMatrix
from .attention import Attend, PlanAttention
from .loras import LoraSlots
from .mixers import KINDS, Parts, ResidualBlock, Streams, Tokens
from .operations import Operations
from .staging import unpack
from .weights import Weights

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
RunLayer = Callable[[Sequence[ResidualBlock], Tensor, Tokens], Tensor]


class GraphDecoder:
    """Weights, KV cache, recurrent state, and the functions that become graphs.

    `hidden [max_tokens + 1, streams * hidden_size] float32` connects the layers of a launch and the head of a step.
    Each token of a launch writes the row that it was given. The last row is for tokens that are not asked for. `tokens
    [max_rows + 1] int32` are the tokens that the last step sampled. The next step may go on from them. `loras` are the
    adapters, if there may be any.
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
        loras: LoraSlots | None = None,
    ) -> None:
        self.windows, self.loras = spec.windows(), loras
        ropes, shapes = _ropes(spec), tensor_shapes(spec)
        operations = operations or Operations()
        loaded = Weights(weights, dtype, device, operations)
        parts = Parts(
            loaded,
            shapes,
            self.windows,
            ropes,
            block_size,
            cache_dtype,
            device,
            attend,
            add_up,
            operations.rotate,
            loras,
            KINDS,
        )
        embedding, head = spec.embedding, spec.head
        width = spec.hidden_size * (1 if spec.streams is None else spec.streams.count)
        self.hidden = torch.zeros((max_tokens + 1, width), device=device)
        self._adapters = torch.zeros(max_tokens + 1, dtype=torch.int32, device=device)  # of these rows
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
        self._per_layer_embedding = loaded.table("embed.per_layer") if embedding.per_layer else None
        self._per_layer_projection = loaded.linear("embed.per_layer_projection") if embedding.per_layer else None
        self._per_layer_norm = loaded.norm(
            "embed.per_layer_norm", embedding.per_layer.norm if embedding.per_layer else None
        )
        self._streams = None if spec.streams is None else Streams(spec.streams, loaded)
        self._embed_update = self._head_update = None
        if loras is not None:
            self._embed_update = loras.update(EMBED, embedding.size, spec.vocab_size)
            self._head_update = loras.update(HEAD, spec.vocab_size, embedding.size)
        self._layers = [
            [ResidualBlock(residual, f"layers.{index}", parts) for residual in layer]
            for index, layer in enumerate(spec.layers)
        ]
        self._final_norm = loaded.norm("final_norm", spec.final_norm)
        self._head = loaded.linear("embed" if head.tied else "head", "head")
        self._caches, self._states = [*parts.caches.values()], parts.states

    def allocate(self, num_blocks: Sequence[int], num_states: int) -> None:
        """Make an empty KV cache of `num_blocks` blocks for each group, and `num_states` empty slots of state.

        They include those for padding.
        """
        self._num_blocks = list(num_blocks)
        for cache in self._caches:
            cache.allocate(num_blocks[cache.group])
        for state in self._states:
            state.allocate(num_states)

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

        `staged` are int32, see `pack`. A negative token id `-1 - i` stands for `tokens[i]`.
        """
        staged_tokens = unpack(staged, num_sequences, query_len, width, len(self.windows))
        token_ids, positions = staged_tokens.token_ids, staged_tokens.positions
        # Where nothing could be sampled there is no token, and its sequence does not go on.
        sampled = self.tokens[(-1 - token_ids).clamp(min=0)].clamp(min=0).long()
        token_ids = torch.where(token_ids < 0, sampled, token_ids)
        plans = [
            self._plan_attention(positions, table, self._block_size, num_blocks, window)
            for table, num_blocks, window in zip(staged_tokens.tables, self._num_blocks, self.windows, strict=True)
        ]
        loras, slots = self.loras, staged_tokens.adapters
        adapters = None if loras is None else loras.chosen(slots)[:, None]
        x = self._embed(token_ids, positions, adapters)
        tokens = Tokens(
            positions,
            staged_tokens.slots,
            staged_tokens.tables,
            plans,
            self._rotations(positions if loras is None else positions / loras.rope_factors[slots, None]),
            staged_tokens.lengths,
            staged_tokens.state_slots,
            adapters,
            self._per_layer(token_ids, x),
        )
        if self._streams is not None:
            x = self._streams.widened(x)
        for spec, layer in zip(self._spec.layers, self._layers, strict=True):
            run_layer = _run_layer if layers is None else layers[spec]
            x = run_layer(layer, x, tokens)
        rows = (staged_tokens.rows.flatten(),)
        self.hidden.index_put_(rows, x.flatten(0, 1))
        if loras is not None:
            self._adapters.index_put_(rows, slots[:, None].expand_as(positions).flatten().int())

    def logits(self, rows: Tensor) -> Tensor:
        """The logits after the tokens whose hidden states are in `rows [R] int32`, `[R, vocab] float32`."""
        head = self._spec.head
        rows = rows.long()
        x = self.hidden[rows]
        if self._streams is not None:
            x = self._streams.narrowed(x)
        x = self._final_norm(x)
        if self._project_out is not None:
            x = self._project_out(x)
        logits = self._head(x)
        if self.loras is not None and self._head_update is not None:
            logits = self._head_update.added(logits, x, self.loras.chosen(self._adapters[rows]))
        logits = logits.float() / head.divisor
        return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)

    def copy_slots(self, source: Tensor, target: Tensor, group: int) -> None:
        """Copy K and V in all layers of a cache group, from the slots `source [N]` to `target [N]`."""
        for cache in self._caches:
            if cache.group == group:
                cache.copy(source, target)

    def copy_states(self, source: Tensor, target: Tensor) -> None:
        """Copy recurrent state in all layers, from the slots `source [N]` to `target [N]`."""
        for state in self._states:
            state.copy(source, target)

    def _embed(self, token_ids: Tensor, positions: Tensor, adapters: Tensor | None) -> Tensor:
        embedding = self._spec.embedding
        x = self._embedding(token_ids).float()
        if adapters is not None and self._embed_update is not None:
            x = x + self._embed_update.looked_up(token_ids, adapters)
        x = x * embedding.scale
        if self._project_in is not None:
            x = self._project_in(x).float()
        if self._positions is not None:
            x = x + self._positions[positions + embedding.position_offset].float()
        return self._embedding_norm(x)

    def _per_layer(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """The input that each layer gets for tokens with the embeddings `x`, `[S, Q, layers, size]`."""
        per_layer = self._spec.embedding.per_layer
        if per_layer is None or self._per_layer_embedding is None or self._per_layer_projection is None:
            return None
        shape = (*token_ids.shape, len(self._spec.layers), per_layer.size)
        projected = self._per_layer_projection(x).float() * per_layer.projection_scale
        rows = torch.where(token_ids < per_layer.vocab_size, token_ids, 0)
        looked_up = self._per_layer_embedding(rows).float().view(shape) * per_layer.scale
        return (self._per_layer_norm(projected.view(shape)) + looked_up) * per_layer.sum_scale

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        rotations = []
        for inv_freq, factor in zip(self._inv_freq, self._factors, strict=True):
            angles = positions.float()[:, :, None] * inv_freq
            rotations.append((angles.cos() * factor, angles.sin() * factor))
        return rotations


def _ropes(spec: DecoderSpec) -> list[RopeSpec]:
    """All ropes of a model, each once."""
    of = (mixer for layer in spec.layers for mixer in mixers(layer))
    ropes = (mixer.rope for mixer in of if isinstance(mixer, AttentionSpec | LatentAttentionSpec))
    return list(dict.fromkeys(rope for rope in ropes if rope is not None))


def _run_layer(layer: Sequence[ResidualBlock], x: Tensor, tokens: Tokens) -> Tensor:
    for residual in layer:
        x = residual(x, tokens)
    return x
