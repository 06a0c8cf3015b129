"""A tower in torch: the reference for all others."""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...models.spec import AttentionSpec, DisentangledSpec, ExpertsSpec, MlpSpec, ParallelSpec, TowerSpec
from ...weights.finite import read_finite
from ...weights.tensor import WeightSource, to_float32
from ..tower import (
    Rows,
    TowerExecutor,
    TowerOptions,
    check_adapters,
    check_seen,
    check_segments,
    checked_attention,
    checked_positions,
    checked_rows,
    rope_axes,
)
from .mixers import Parts, ResidualBlock, Tokens
from .mixers.attention import rotate, temperature_at
from .mixers.experts import Experts
from .mixers.mlp import Mlp, activate
from .mixers.parallel import Parallel
from .weights import DTYPES, Weights


class _Attention:
    """Softmax attention of a segment's rows to all of them, the first ones, those before them, or near ones."""

    def __init__(self, spec: AttentionSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights, self._dtype = spec, layer, parts.weights, parts.cache_dtype

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The output for the rows `x [n, hidden]` of a segment, in the same shape."""
        spec, weights = self._spec, self._weights
        keys = weights.linear(f"{self._layer}.k", x)
        values = keys if spec.values_from_keys else weights.linear(f"{self._layer}.v", x)
        values = weights.norm(f"{self._layer}.v_norm", spec.v_norm, values.view(len(x), -1, spec.head_dim))
        q = self._placed("q", weights.linear(f"{self._layer}.q", x), tokens)
        k = self._placed("k", keys, tokens)
        if spec.query_temperature is not None:
            q = q * temperature_at(spec.query_temperature, torch.arange(len(x)))[:, None, None]
        q, k, v = (heads.to(self._dtype).float() for heads in (q, k, values))
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", q, k)
        if spec.disentangled is not None:
            scores = self._with_positions(spec.disentangled, scores, q, k)
        scores = scores * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = self._by_distance(scores)
        if tokens.visible_until is not None:
            unseen = torch.arange(len(x)) >= tokens.visible_until[:, None]
            scores = scores.masked_fill(unseen, -torch.inf)
        result = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
        return weights.linear(f"{self._layer}.o", result.reshape(len(x), -1))

    def _with_positions(self, spec: DisentangledSpec, scores: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The scores `[heads, n, n]`, with those of content and positions. `q` and `k [n, heads, D]`."""
        places, span = torch.arange(len(q)), len(spec.rows) // 2
        rows = torch.tensor(spec.rows)[(places - places[:, None]).clamp(-span, span) + span].expand(scores.shape)
        for name, x, there in (("pos_k", q, rows), ("pos_q", k, rows.mT)):
            if name in spec.tables:
                table = self._weights[f"{self._layer}.{name}.weight"].view(scores.shape[0], spec.num_rows, -1)
                products = torch.einsum("nhd,hrd->hnr", x, table).gather(2, there)
                scores = scores + (products if name == "pos_k" else products.mT)
        return scores

    def _by_distance(self, scores: Tensor) -> Tensor:
        """The scores `[heads, n, n]`, with what depends on how far a key is from its query."""
        spec, places = self._spec, torch.arange(scores.shape[-1])
        distances = places - places[:, None]
        if spec.alibi_slopes is not None:
            scores = scores - torch.tensor(spec.alibi_slopes)[:, None, None] * distances.abs()
        if spec.bias_span is not None:
            biases = self._weights[f"{self._layer}.distance_bias"].view(spec.num_heads, -1)
            reach = biases.shape[1] // 2
            scores = scores + biases[:, distances.clamp(-reach, reach) + reach]
        if not spec.two_way:
            scores = scores.masked_fill(distances > 0, -torch.inf)
        if spec.sliding_window is not None:
            scores = scores.masked_fill(distances.abs() >= spec.sliding_window, -torch.inf)
        return scores

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy."""

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy."""

    def _placed(self, name: str, x: Tensor, tokens: Tokens) -> Tensor:
        """Queries or keys `[n, heads * D]`, normalized and rotated: `[n, heads, D]`."""
        spec = self._spec
        x = x.view(len(x), -1, spec.head_dim)
        if not spec.qk_norm_after_rope:
            x = self._norm(f"{self._layer}.{name}_norm", x)
        if spec.rope is not None:
            x = rotate(spec.rope, x, tokens.turned_by(spec.rope))
        return self._norm(f"{self._layer}.{name}_norm", x) if spec.qk_norm_after_rope else x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        shape = (len(x), -1) if self._spec.qk_norm_over == "whole" else x.shape
        each = self._spec.qk_norm_over == "each"
        return self._weights.norm(name, self._spec.qk_norm, x.view(shape), each).view(x.shape)


_KINDS: dict[str, Any] = {
    AttentionSpec.kind: _Attention,
    ExpertsSpec.kind: Experts,
    MlpSpec.kind: Mlp,
    ParallelSpec.kind: Parallel,
}


class TorchTower(TowerExecutor):
    """A tower that computes segment by segment, and layer by layer."""

    def __init__(
        self, spec: TowerSpec, weights: WeightSource, options: TowerOptions, cancellation: Cancellation
    ) -> None:
        if options.adapters:
            raise DeviceError("the torch device has no adapters of towers")
        self.spec, self._max_rows = spec, options.max_rows
        self._axes = [rope_axes(layer) for layer in spec.layers]
        self._dtype = dtype = DTYPES[options.dtype]
        tables = dict(spec.tables)
        tensors = dict(read_finite(weights, cancellation))
        self._tables = {name: to_float32(tensors.pop(name)) for name in tables}
        self._weights: Weights | None = Weights(tensors.items(), dtype)
        parts = Parts(self._weights, {}, 1, 0, dtype, _KINDS)
        self._layers = [
            [ResidualBlock(residual, f"layers.{index}", parts) for residual in layer]
            for index, layer in enumerate(spec.layers)
        ]

    def project(self, name: str, rows: Rows) -> Generator[None, None, Rows]:
        """See TowerExecutor."""
        weights = self._loaded()
        projection = dict(self.spec.projections).get(name)
        if projection is None:
            raise ValueError(f"the tower has no projection {name}")
        rows = checked_rows(rows, projection.inputs)
        with torch.inference_mode():
            x = weights.norm(f"{name}.norm", projection.norm, torch.tensor(rows))
            x = weights.linear(name, x)
            if projection.activation is not None:
                x = activate(projection.activation, x)
        yield
        return x.numpy()

    def layer(
        self,
        index: int,
        rows: Rows,
        segments: NDArray[np.int32],
        positions: NDArray[np.int32] | None = None,
        *,
        seen: NDArray[np.int32] | None = None,
        in_place: bool = False,
        adapters: NDArray[np.int32] | None = None,
        read: NDArray[np.int32] | None = None,
    ) -> Generator[None, None, Rows]:
        """See TowerExecutor. All rows are computed."""
        self._loaded()
        rows = checked_rows(rows, self.spec.hidden_size)
        check_segments(segments, len(rows), self._max_rows)
        check_seen(self.spec, segments, seen)
        check_adapters(segments, adapters)
        if adapters is not None and (adapters >= 0).any():
            raise ValueError(f"there is no adapter {adapters.max()}: the torch device has none of towers")
        turned_by = checked_positions(self._axes, index, positions, len(rows))
        if turned_by is None:
            turned_by = np.zeros((1, len(rows)), np.int32)
        out = np.empty_like(rows)
        for segment, (begin, end) in enumerate(pairwise(segments.tolist())):
            places = torch.tensor(turned_by[:, begin:end])
            until = None if seen is None else torch.full((end - begin,), int(seen[segment]))
            with torch.inference_mode():
                x = torch.tensor(rows[begin:end])
                for residual in self._layers[index]:
                    x = residual(x, Tokens(places, places[0], None, {}, axis_positions=places, visible_until=until))
                out[begin:end] = x.numpy()
            yield
        return out

    def attend(self, name: str, queries: Rows, keys: Rows, values: Rows) -> Generator[None, None, Rows]:
        """See TowerExecutor."""
        self._loaded()
        attention, *rows = checked_attention(self.spec, name, (queries, keys, values), self._max_rows)
        with torch.inference_mode():
            q, k, v = (torch.tensor(one).view(len(one), -1, attention.head_dim) for one in rows)
            q, k, v = (heads.to(self._dtype).float() for heads in (q, k, v))
            scores = torch.einsum("nhd,mhd->hnm", q, k) * attention.scale
            result = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
        yield
        return result.reshape(len(q), -1).numpy()

    def table(self, name: str) -> Rows:
        """See TowerExecutor. Raises ValueError for a name that is not the spec's."""
        if name not in self._tables:
            raise ValueError(f"the tower has no table {name}")
        return self._tables[name]

    def close(self) -> None:
        """Free the weights. Calling it twice is allowed."""
        self._weights = None
        self._layers, self._tables = [], {}

    def _loaded(self) -> Weights:
        if self._weights is None:
            raise DeviceError("this tower was closed")
        return self._weights
