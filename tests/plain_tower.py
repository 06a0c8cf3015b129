"""A TowerExecutor in plain torch, which reads a checkpoint by what a Vision says of it."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tidewheel.engine.devices.tower import Rows, TowerExecutor
from tidewheel.engine.media.vision import Vision
from tidewheel.engine.models.spec import AttentionSpec, MlpSpec, NormSpec, RopeSpec, tower_shapes
from tidewheel.engine.models.tensor_ref import TensorRef
from tidewheel.engine.weights.taking import rows_of, scaled
from tidewheel.engine.weights.tensor import DenseTensor

Stored = Mapping[str, NDArray[np.float32]]


def taken(stored: Stored, ref: TensorRef) -> NDArray[np.float32]:
    """What a reference takes of tensors in `stored`, in the shape that it promises."""
    if ref.stack:
        return np.concatenate([taken(stored, part) for part in ref.parts()])
    whole = stored[ref.name]
    part = whole if ref.index is None else whole[ref.index]
    rows = cast("NDArray[np.float32]", rows_of(part.T if ref.transpose else part, ref))
    assert rows.shape == ref.shape(whole.shape)
    if ref.scaled_by:
        return scaled(DenseTensor(rows, "float32"), DenseTensor(stored[ref.scaled_by], "float32")).data
    return rows


def tower_weights(vision: Vision, stored: Stored) -> dict[str, torch.Tensor]:
    """All weights that a tower needs, each from the first place that there is. They have the shapes that they need."""
    weights = {}
    shapes = tower_shapes(vision.spec)
    assert vision.tensors.keys() == shapes.keys()
    for name, shape in shapes.items():
        places = [ref for ref in vision.tensors[name] if ref.name in stored]
        assert places, f"{name} is in none of {[ref.name for ref in vision.tensors[name]]}"
        content = taken(stored, places[0])
        assert content.shape == shape, name
        weights[name] = torch.from_numpy(np.ascontiguousarray(content))
    return weights


class PlainTower(TowerExecutor):
    """Computes a layer at once, and each projection too, between two yields."""

    def __init__(self, vision: Vision, stored: Stored) -> None:
        self.spec = vision.spec
        self._weights = tower_weights(vision, stored)
        self.used: set[str] = set()

    def project(self, name: str, rows: Rows) -> Generator[None, None, Rows]:
        spec = dict(self.spec.projections)[name]
        if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != spec.inputs:
            raise ValueError(f"{name} takes rows of {spec.inputs}, not {rows.shape} of {rows.dtype}")
        yield
        x = self._norm(f"{name}.norm", spec.norm, torch.from_numpy(rows))
        x = self._linear(name, x, spec.bias)
        return _numpy(x if spec.activation is None else _activated(spec.activation, x))

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
        assert rows.dtype == np.float32
        assert seen is None
        assert adapters is None
        assert segments.dtype == np.int32
        assert (segments[0], segments[-1]) == (0, len(rows))
        assert positions is None or (positions.dtype == np.int32 and positions.shape[1] == len(rows))
        yield
        x = torch.from_numpy(np.ascontiguousarray(rows))
        for residual in self.spec.layers[index]:
            prefix = f"layers.{index}."
            inner = self._norm(f"{prefix}{residual.mixer.kind}_norm", residual.norm, x)
            if isinstance(residual.mixer, AttentionSpec):
                out = self._attention(prefix, residual.mixer, inner, segments, positions)
            else:
                assert isinstance(residual.mixer, MlpSpec)
                out = self._mlp(prefix, residual.mixer, inner)
            out = self._norm(f"{prefix}{residual.mixer.kind}_post_norm", residual.post_norm, out)
            x = self._norm(f"{prefix}{residual.mixer.kind}_sum_norm", residual.sum_norm, x + residual.scale * out)
        return _numpy(x)

    def attend(self, name: str, queries: Rows, keys: Rows, values: Rows) -> Generator[None, None, Rows]:
        spec = dict(self.spec.cross_attentions)[name]
        assert {rows.shape[1] for rows in (queries, keys, values)} == {spec.width}
        yield
        q, k, v = (
            torch.from_numpy(np.ascontiguousarray(rows)).reshape(len(rows), -1, spec.head_dim).transpose(0, 1)
            for rows in (queries, keys, values)
        )
        scores = torch.softmax(q @ k.transpose(1, 2) * spec.scale, -1)
        return _numpy((scores @ v).transpose(0, 1).reshape(len(queries), -1))

    def table(self, name: str) -> Rows:
        assert name in dict(self.spec.tables)
        self.used.add(name)
        return _numpy(self._weights[name])

    def unused(self) -> set[str]:
        """Weights that nothing has asked for."""
        return self._weights.keys() - self.used

    def close(self) -> None:
        self._weights.clear()

    def _weight(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self._weights[name]

    def _linear(self, name: str, x: torch.Tensor, bias: bool, clipped: bool = False) -> torch.Tensor:
        least, most = -math.inf, math.inf
        if clipped:
            *of_inputs, least, most = self._weight(f"{name}.bounds").tolist()
            x = x.clamp(*of_inputs)
        x = functional.linear(x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias") if bias else None)
        return x.clamp(least, most)

    def _norm(self, name: str, spec: NormSpec | None, x: torch.Tensor) -> torch.Tensor:
        if spec is None:
            return x
        weight = self._weight(f"{name}.weight") + float(spec.unit_offset) if spec.weight else torch.ones(())
        if spec.kind == "layer":
            bias = self._weight(f"{name}.bias") if spec.bias else None
            return functional.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.eps) * weight

    def _mlp(self, prefix: str, spec: MlpSpec, x: torch.Tensor) -> torch.Tensor:
        inner = self._linear(f"{prefix}up", x, spec.bias, spec.clipped)
        if spec.gated:
            inner = _activated(spec.activation, self._linear(f"{prefix}gate", x, spec.bias, spec.clipped)) * inner
        else:
            inner = _activated(spec.activation, inner)
        return self._linear(f"{prefix}down", inner, spec.bias, spec.clipped)

    def _attention(
        self,
        prefix: str,
        spec: AttentionSpec,
        x: torch.Tensor,
        segments: NDArray[np.int32],
        positions: NDArray[np.int32] | None,
    ) -> torch.Tensor:
        heads = {}
        for name in ("q", "k", "v"):
            part = self._linear(f"{prefix}{name}", x, spec.qkv_bias, spec.clipped)
            norm = spec.v_norm if name == "v" else spec.qk_norm
            if spec.qk_norm_over == "whole":
                part = self._norm(f"{prefix}{name}_norm", norm, part)
            part = part.reshape(len(x), -1, spec.head_dim).transpose(0, 1)
            if spec.qk_norm_over != "whole":
                part = self._norm(f"{prefix}{name}_norm", norm, part)
            heads[name] = part.repeat_interleave(spec.num_heads // len(part), 0)
        if spec.rope is not None:
            assert positions is not None
            heads |= {name: _rotated(spec.rope, heads[name], positions) for name in ("q", "k")}
        outputs = []
        for start, stop in zip(segments[:-1].tolist(), segments[1:].tolist(), strict=True):
            assert start < stop
            q, k, v = (heads[name][:, start:stop] for name in ("q", "k", "v"))
            scores = torch.softmax(q @ k.transpose(1, 2) * spec.scale, -1)
            outputs.append((scores @ v).transpose(0, 1).reshape(stop - start, -1))
        return self._linear(f"{prefix}o", torch.cat(outputs), spec.out_bias, spec.clipped)


def run(generator: Generator[None, None, Any]) -> Any:
    """What a generator returns in the end."""
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def _rotated(rope: RopeSpec, heads: torch.Tensor, positions: NDArray[np.int32]) -> torch.Tensor:
    places = torch.from_numpy(positions[list(rope.axes)]).float()  # [pairs, N]
    angles = (places * torch.tensor(rope.inv_freq)[:, None]).T
    cos, sin = angles.cos(), angles.sin()
    if rope.interleaved:
        first, second = heads[..., 0::2], heads[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    first, second = heads.split(len(rope.inv_freq), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _activated(activation: str, x: torch.Tensor) -> torch.Tensor:
    if activation == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


def _numpy(x: torch.Tensor) -> Rows:
    assert math.isfinite(float(x.sum()))
    return np.ascontiguousarray(x.numpy(), np.float32)
