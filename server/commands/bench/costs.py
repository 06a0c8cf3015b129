"""How much arithmetic and memory traffic a step needs at least: what measured times are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tidewheel.engine.models.spec import DecoderSpec, tensor_shapes

FLOPS_COUNTED = (
    "FLOPs: 2 x matrix parameters a token, the head's only for rows that need logits, plus attention's "
    "4 x attended tokens x heads x head dim a layer"
)
BYTES_COUNTED = "bytes of a decode step: the packed weights once, plus the K and V of the tokens that are attended"


_KERNEL_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "out", "gate": "up", "up": "up", "down": "down"}


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel must do at least: FLOPs, and the bytes that it must read, None where nobody counts them."""

    flops: float
    num_bytes: float | None


class Costs:
    """The least work that a model needs. One multiplication and one addition are 2 FLOPs.

    The counts are those of https://arxiv.org/abs/2001.08361 (its table 1, forward pass), with attention counted for
    what a token may attend to: the tokens before it, itself, and no more than the sliding window.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        weight_bytes: int,
        kv_bytes_per_token: int,
        embedding_bytes_per_parameter: float | None = None,
    ) -> None:
        """`weight_bytes` is all that the device keeps; the tables of which a step reads single rows are left out.

        `embedding_bytes_per_parameter` is for an embedding and a head that are kept in another format than the rest.
        """
        shapes = tensor_shapes(spec)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        matrices = {name: size for name, size in sizes.items() if len(shapes[name]) == 2}
        head = "embed.weight" if spec.head.tied else "head.weight"
        lookups = sum(matrices.get(name, 0) for name in {"embed.weight", "embed.positions"} - {head})
        self.parameters = sum(sizes.values())
        self.head_parameters = matrices[head] + matrices.get("embed.project_out.weight", 0)
        self.body_parameters = sum(matrices.values()) - lookups - self.head_parameters
        embedding = sizes["embed.weight"] + sizes.get("head.weight", 0)
        self._embedding_bytes = embedding_bytes_per_parameter or weight_bytes / self.parameters
        self._body_bytes = (weight_bytes - embedding * self._embedding_bytes) / (self.parameters - embedding)
        lookup_bytes = 0 if spec.head.tied else sizes["embed.weight"] * self._embedding_bytes
        lookup_bytes += sizes.get("embed.positions", 0) * self._body_bytes
        self.weight_bytes_read = round(weight_bytes - lookup_bytes)
        self._linears = {"qkv": 0, "out": 0, "up": 0, "down": 0}
        for name, size in matrices.items():
            if name.startswith("layers."):
                self._linears[_KERNEL_OF[name.split(".")[2]]] += size
        self._layers = list(spec.attentions())
        kv_size = sum(attention.num_kv_heads * attention.head_dim for attention in self._layers)
        self._kv_bytes_per_value = kv_bytes_per_token / kv_size

    def flops(self, start: int, num_tokens: int, rows: int) -> float:
        """FLOPs of one sequence's tokens at `[start, start + num_tokens)`, of which `rows` get logits."""
        linear = 2.0 * (self.body_parameters * num_tokens + self.head_parameters * rows)
        return linear + self._attention_flops(start, num_tokens)

    def decode_bytes(self, start: int, num_tokens: int, batch_size: int) -> float:
        """Bytes read by `num_tokens` decode steps of `batch_size` sequences whose first token is at `start`."""
        return num_tokens * self.weight_bytes_read + batch_size * self._kv_bytes(start, num_tokens)

    def prefill_kernels(self, prompts: int, num_tokens: int, steps: int) -> dict[str, Work]:
        """The work of each kernel in a prefill of so many steps."""
        attention = Work(prompts * self._attention_flops(0, num_tokens), None)
        return {**self._linear_kernels(prompts * num_tokens, prompts, steps), "attention": attention}

    def decode_kernels(self, start: int, num_tokens: int, batch_size: int) -> dict[str, Work]:
        """The work of each kernel in `num_tokens` decode steps, as in `decode_bytes`."""
        rows = batch_size * num_tokens
        flops, num_bytes = self._attention_flops(start, num_tokens), self._kv_bytes(start, num_tokens)
        attention = Work(batch_size * flops, batch_size * num_bytes)
        return {**self._linear_kernels(rows, rows, num_tokens), "attention": attention}

    def _linear_kernels(self, num_tokens: int, rows: int, steps: int) -> dict[str, Work]:
        work = {
            name: Work(2.0 * size * num_tokens, steps * size * self._body_bytes) for name, size in self._linears.items()
        }
        head = self.head_parameters
        return {**work, "head": Work(2.0 * head * rows, steps * head * self._embedding_bytes)}

    def _attention_flops(self, start: int, num_tokens: int) -> float:
        return sum(
            4.0 * layer.num_heads * layer.head_dim * _attended(start, num_tokens, layer.sliding_window)
            for layer in self._layers
        )

    def _kv_bytes(self, start: int, num_tokens: int) -> float:
        values = sum(
            layer.num_kv_heads * layer.head_dim * _attended(start, num_tokens, layer.sliding_window)
            for layer in self._layers
        )
        return values * self._kv_bytes_per_value


def _attended(start: int, num_tokens: int, window: int | None) -> int:
    """How many pairs of a token at `[start, start + num_tokens)` and one that it attends to there are."""
    attended = np.arange(start + 1, start + num_tokens + 1, dtype=np.int64)
    return int((attended if window is None else np.minimum(attended, window)).sum())
