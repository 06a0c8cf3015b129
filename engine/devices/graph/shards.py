"""A model in parts for several accelerators, as Megatron cuts it (https://arxiv.org/abs/1909.08053).

Heads and the inner width of MLPs and experts are shared out: q, k, v, gate and up by their outputs, o and down by their
inputs. What a residual block gives is then the sum over all parts. Embedding, norms, routers and the head are whole in
each part, and so are latents. A KV head that serves several parts is in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MixerSpec,
    MlpSpec,
    ParallelSpec,
    ResidualBlockSpec,
)
from ...weights.tensor import DenseTensor
from ..grouped_weights import GroupedMatrix, tensor_shape

_BY_OUTPUTS = ("q", "q_gate", "gate", "up", "latent_q", "latent_q_up", "latent_k_up", "latent_v_up")
_BY_INPUTS = ("o", "down", "latent_o")


Inner = TypeVar("Inner", MlpSpec, ExpertsSpec)


class Shards:
    """The parts of a model. Raises DeviceError, naming what cannot be shared out evenly."""

    def __init__(self, spec: DecoderSpec, size: int) -> None:
        self._whole, self._size = spec, size
        self._kv_heads = {
            f"layers.{index}": attention.num_kv_heads
            for index, layer in enumerate(spec.layers)
            for attention in _attentions(layer)
        }
        self._each_norm = {
            f"layers.{index}"
            for index, layer in enumerate(spec.layers)
            for attention in _attentions(layer)
            if attention.qk_norm_over == "each"
        }
        self.specs = [self._spec(rank) for rank in range(size)]

    def cut(self, name: str, tensor: DenseTensor | GroupedMatrix) -> list[DenseTensor | GroupedMatrix]:
        """Each part's share of a weight. A plan for as many parts divides no group of a quantized one."""
        layer, _, rest = name.rpartition(".")
        layer, _, linear = layer.rpartition(".") if rest in ("weight", "bias") else (layer, "", rest)
        rows = np.arange(tensor_shape(tensor)[0])
        if layer in self._each_norm:
            linear = {"q_norm": "q", "k_norm": "k"}.get(linear, linear)
        if linear in ("k", "v") and layer in self._kv_heads:
            heads = rows.reshape(self._kv_heads[layer], -1)
            copies = max(self._size // len(heads), 1)
            parts = np.split(np.repeat(heads, copies, axis=0), self._size)
            return [_rows(tensor, part.reshape(-1)) for part in parts]
        if not layer.startswith("layers."):
            return [tensor] * self._size
        if linear in _BY_OUTPUTS or linear == "sinks":
            return [_rows(tensor, part) for part in np.split(rows, self._size)]
        if linear in _BY_INPUTS and rest == "weight":
            width = tensor_shape(tensor)[1] // self._size
            return [_inputs(tensor, rank * width, (rank + 1) * width) for rank in range(self._size)]
        if linear in _BY_INPUTS and isinstance(tensor, DenseTensor):  # a bias is added once
            return [tensor, *[_with(tensor, np.zeros_like(tensor.data))] * (self._size - 1)]
        return [tensor] * self._size

    def _spec(self, rank: int) -> DecoderSpec:
        def residual(old: ResidualBlockSpec) -> ResidualBlockSpec:
            return replace(old, mixer=self._mixer(old.mixer, rank, residual))

        return replace(self._whole, layers=tuple(tuple(map(residual, layer)) for layer in self._whole.layers))

    def _mixer(
        self, mixer: MixerSpec, rank: int, residual: Callable[[ResidualBlockSpec], ResidualBlockSpec]
    ) -> MixerSpec:
        size = self._size
        if isinstance(mixer, ParallelSpec):
            return ParallelSpec(tuple(map(residual, mixer.residuals)))
        if isinstance(mixer, MlpSpec):
            if mixer.cutoff is not None:
                raise self._refused("an MLP whose gate is compared with the mean of all its values")
            return self._narrower(mixer, "an MLP")
        if isinstance(mixer, ExpertsSpec):
            shared = None if mixer.shared is None else self._narrower(mixer.shared, "a shared expert")
            return replace(self._narrower(mixer, "an expert"), shared=shared)
        if isinstance(mixer, LatentAttentionSpec):
            if mixer.num_heads % size:
                raise self._refused(f"{mixer.num_heads} heads of attention to latents")
            return replace(mixer, num_heads=mixer.num_heads // size)
        if not isinstance(mixer, AttentionSpec):
            raise self._refused(f"{mixer.kind} layers")
        heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            raise self._refused(f"{heads} query heads with {kv_heads} KV heads")
        if mixer.qk_norm and mixer.qk_norm_over == "whole":
            raise self._refused("queries and keys that are normalized over all heads together")
        own = slice(rank * heads // size, (rank + 1) * heads // size)
        return replace(
            mixer,
            num_heads=heads // size,
            num_kv_heads=max(kv_heads // size, 1),
            alibi_slopes=None if mixer.alibi_slopes is None else mixer.alibi_slopes[own],
        )

    def _narrower(self, mixer: Inner, what: str) -> Inner:
        if mixer.intermediate_size % self._size:
            raise self._refused(f"{what} of {mixer.intermediate_size} values")
        return replace(mixer, intermediate_size=mixer.intermediate_size // self._size)

    def _refused(self, what: str) -> DeviceError:
        return DeviceError(
            f"{what} cannot be shared by {self._size} accelerators: choose another --tensor-parallel-size"
        )


def _rows(tensor: DenseTensor | GroupedMatrix, index: NDArray[np.integer]) -> DenseTensor | GroupedMatrix:
    return _with(tensor, tensor.data[index]) if isinstance(tensor, DenseTensor) else tensor.rows(index)


def _inputs(tensor: DenseTensor | GroupedMatrix, start: int, stop: int) -> DenseTensor | GroupedMatrix:
    return _with(tensor, tensor.data[:, start:stop]) if isinstance(tensor, DenseTensor) else tensor.inputs(start, stop)


def _with(tensor: DenseTensor, data: NDArray[np.generic]) -> DenseTensor:
    return replace(tensor, data=np.ascontiguousarray(data), mapped=False)


def _attentions(residuals: tuple[ResidualBlockSpec, ...]) -> list[AttentionSpec]:
    found = []
    for residual in residuals:
        if isinstance(residual.mixer, ParallelSpec):
            found += _attentions(residual.mixer.residuals)
        elif isinstance(residual.mixer, AttentionSpec):
            found.append(residual.mixer)
    return found
