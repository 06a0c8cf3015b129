"""How much arithmetic and memory traffic a step needs at least: what measured times are held against."""

from __future__ import annotations

import math

import numpy as np

from tidewheel.engine.models.spec import DecoderSpec, tensor_shapes

FLOPS_COUNTED = (
    "FLOPs: 2 x matrix parameters a token, the head's only for rows that need logits, plus attention's "
    "4 x attended tokens x heads x head dim a layer"
)
BYTES_COUNTED = "bytes of a decode step: the packed weights once, plus the K and V of the tokens that are attended"


class Costs:
    """The least work that a model needs. One multiplication and one addition are 2 FLOPs.

    The counts are those of https://arxiv.org/abs/2001.08361 (its table 1, forward pass), with attention counted for
    what a token may attend to: the tokens before it, itself, and no more than the sliding window.
    """

    def __init__(self, spec: DecoderSpec, *, weight_bytes: int, kv_bytes_per_token: int) -> None:
        """`weight_bytes` is all that the device keeps; the tables of which a step reads single rows are left out."""
        shapes = tensor_shapes(spec)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        matrices = {name: size for name, size in sizes.items() if len(shapes[name]) == 2}
        head = "embed.weight" if spec.tied_head else "head.weight"
        lookups = sum(matrices.get(name, 0) for name in {"embed.weight", "embed.positions"} - {head})
        self.parameters = sum(sizes.values())
        self.head_parameters = matrices[head] + matrices.get("embed.project_out.weight", 0)
        self.body_parameters = sum(matrices.values()) - lookups - self.head_parameters
        self.weight_bytes_read = round(weight_bytes * (1 - lookups / self.parameters))
        self._layers = [layer.attention for layer in spec.layers]
        kv_size = sum(attention.num_kv_heads * attention.head_dim for attention in self._layers)
        self._kv_bytes_per_value = kv_bytes_per_token / kv_size

    def flops(self, start: int, num_tokens: int, rows: int) -> float:
        """FLOPs of one sequence's tokens at `[start, start + num_tokens)`, of which `rows` get logits."""
        attention = sum(
            4 * layer.num_heads * layer.head_dim * _attended(start, num_tokens, layer.sliding_window)
            for layer in self._layers
        )
        return 2.0 * (self.body_parameters * num_tokens + self.head_parameters * rows) + attention

    def decode_bytes(self, start: int, num_tokens: int, batch_size: int) -> float:
        """Bytes read by `num_tokens` decode steps of `batch_size` sequences whose first token is at `start`."""
        cached = sum(
            layer.num_kv_heads * layer.head_dim * _attended(start, num_tokens, layer.sliding_window)
            for layer in self._layers
        )
        return num_tokens * self.weight_bytes_read + batch_size * cached * self._kv_bytes_per_value


def _attended(start: int, num_tokens: int, window: int | None) -> int:
    """How many pairs of a token at `[start, start + num_tokens)` and one that it attends to there are."""
    attended = np.arange(start + 1, start + num_tokens + 1, dtype=np.int64)
    return int((attended if window is None else np.minimum(attended, window)).sum())
