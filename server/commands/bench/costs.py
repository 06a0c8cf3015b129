"""How much arithmetic and memory traffic a step needs at least: what measured times are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tidewheel.engine.devices.cache_split import GroupBytes
from tidewheel.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    KvShape,
    LatentAttentionSpec,
    Mamba2Spec,
    mixers,
)

from .weights_read import WeightsRead

FLOPS_COUNTED = (
    "FLOPs: 2 x the parameters of matrices and convolutions that a token is multiplied with, the head's only for rows "
    "that need logits, plus attention's 2 x attended tokens x heads x numbers of a key and a value, plus 7 (delta net) "
    "or 5 (Mamba2) for each number of a recurrence's state"
)
BYTES_COUNTED = (
    "bytes of a decode step: the packed weights once, the K and V of the tokens that are attended, and recurrent state "
    "read and written"
)

_DELTA_FLOPS = 7  # of each number of a state: the decay 1, and 2 for S^T k, for k d^T and for S^T q
_MAMBA_FLOPS = 5  # the decay 1, and 2 for B x^T and for S^T C
_STATE_BYTES = 2 * 4  # of each number: read and written, float32


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a kernel: FLOPs, and the bytes that it must read, None where they are not counted."""

    flops: float
    num_bytes: float | None


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's: FLOPs for each token that is attended, and bytes that are read of it."""

    window: int | None
    flops: int
    num_bytes: float


class Costs:
    """The least work that a model needs. One multiplication and one addition are 2 FLOPs.

    The counts are as in https://arxiv.org/abs/2001.08361 (its table 1, forward pass). Attention counts what a token may
    attend to: the tokens before it, itself, and no more than the sliding window.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        tensor_bytes: Mapping[str, int],
        weight_bytes: int,
        kv_groups: Sequence[GroupBytes],
    ) -> None:
        """`weight_bytes` is all that the device keeps, and `tensor_bytes` what each of `tensor_shapes` is of it.

        What the device adds in padding is shared out evenly. `kv_groups` are the cache groups' bytes a token.
        """
        padding = weight_bytes / max(sum(tensor_bytes.values()), 1)
        self.weights = WeightsRead(spec, {name: size * padding for name, size in tensor_bytes.items()})
        self._attentions = _attentions(spec, kv_groups)
        self._states = sum(_state_numbers(mixer) for mixer in spec.recurrences())
        self._tails = sum(mixer.state_size - _state_numbers(mixer) for mixer in spec.recurrences())
        self._recurrence_flops = sum(_recurrence_flops(mixer) for mixer in spec.recurrences())

    def flops(self, start: int, num_tokens: int, rows: int) -> float:
        """FLOPs of one sequence's tokens at `[start, start + num_tokens)`. `rows` of them get logits."""
        linear = sum(
            2.0 * self.weights.parameters(name) * (rows if name == "head" else num_tokens)
            for name in self.weights.kernels
        )
        return linear + self._attention_flops(start, num_tokens) + num_tokens * self._recurrence_flops

    def decode_bytes(self, start: int, num_tokens: int, batch_size: int) -> float:
        """Bytes read by `num_tokens` decode steps of `batch_size` sequences whose first token is at `start`."""
        state = num_tokens * (self._states + self._tails) * _STATE_BYTES
        return num_tokens * self.weights.all_bytes(batch_size) + batch_size * (
            self._kv_bytes(start, num_tokens) + state
        )

    def prefill_kernels(self, prompts: int, num_tokens: int, steps: int) -> dict[str, Work]:
        """The work of each kernel in a prefill of `steps` steps."""
        work = self._linear_kernels(prompts * num_tokens, prompts, steps)
        if self._attentions:
            work["attention"] = Work(prompts * self._attention_flops(0, num_tokens), None)
        if self._recurrence_flops:
            work["recurrence"] = Work(prompts * num_tokens * self._recurrence_flops, None)
        return work

    def decode_kernels(self, start: int, num_tokens: int, batch_size: int) -> dict[str, Work]:
        """The work of each kernel in `num_tokens` decode steps, as in `decode_bytes`."""
        rows = batch_size * num_tokens
        work = self._linear_kernels(rows, rows, num_tokens)
        if self._attentions:
            flops, num_bytes = self._attention_flops(start, num_tokens), self._kv_bytes(start, num_tokens)
            work["attention"] = Work(batch_size * flops, batch_size * num_bytes)
        if self._recurrence_flops:
            work["recurrence"] = Work(rows * self._recurrence_flops, rows * self._states * _STATE_BYTES)
        if (taps := work.get("convolution")) is not None and taps.num_bytes is not None:
            work["convolution"] = replace(taps, num_bytes=taps.num_bytes + rows * self._tails * _STATE_BYTES)
        return work

    def _linear_kernels(self, num_tokens: int, rows: int, steps: int) -> dict[str, Work]:
        return {
            name: Work(
                2.0 * self.weights.parameters(name) * (rows if name == "head" else num_tokens),
                steps * self.weights.bytes_of(name, num_tokens / steps),
            )
            for name in self.weights.kernels
        }

    def _attention_flops(self, start: int, num_tokens: int) -> float:
        return sum(float(layer.flops) * _attended(start, num_tokens, layer.window) for layer in self._attentions)

    def _kv_bytes(self, start: int, num_tokens: int) -> float:
        return sum(layer.num_bytes * _attended(start, num_tokens, layer.window) for layer in self._attentions)


def _attentions(spec: DecoderSpec, kv_groups: Sequence[GroupBytes]) -> list[_Attention]:
    """The attention of all layers. A cache group's padding on the device is divided evenly among its layers."""
    values = dict.fromkeys(spec.windows(), 0)
    for shape in spec.caches():
        values[shape.window] += shape.values
    # Without attention there is a group that keeps nothing.
    bytes_per_value = {g.window: g.bytes_per_token / values[g.window] for g in kv_groups if values[g.window]}

    def attention(num_heads: int, cached: KvShape) -> _Attention:
        flops = 2 * num_heads * (cached.key_dim + cached.value_dim)
        return _Attention(cached.window, flops, cached.values * bytes_per_value[cached.window])

    found = []
    for layer in spec.layers:
        for mixer in mixers(layer):
            if isinstance(mixer, AttentionSpec):
                cached = replace(mixer, kv_layer=None).cached  # another layer's cache is read all the same
                assert cached is not None
                found.append(attention(mixer.num_heads, cached))
            elif isinstance(mixer, LatentAttentionSpec):
                found.append(attention(mixer.num_heads, mixer.cached))
    return found


def _state_numbers(mixer: object) -> int:
    """How many numbers a recurrence multiplies with each token. A convolution's last inputs are not among them."""
    if isinstance(mixer, DeltaNetSpec):
        return mixer.num_value_heads * mixer.key_dim * mixer.value_dim
    return mixer.size * mixer.state_dim if isinstance(mixer, Mamba2Spec) else 0


def _recurrence_flops(mixer: object) -> int:
    """FLOPs of one token."""
    return _state_numbers(mixer) * (_DELTA_FLOPS if isinstance(mixer, DeltaNetSpec) else _MAMBA_FLOPS)


def _attended(start: int, num_tokens: int, window: int | None) -> int:
    """How many pairs of a token at `[start, start + num_tokens)` and one that it attends to there are."""
    attended = np.arange(start + 1, start + num_tokens + 1, dtype=np.int64)
    return int((attended if window is None else np.minimum(attended, window)).sum())
