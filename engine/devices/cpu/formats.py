"""The formats that the native runtime keeps matrices in: chosen before any is read, and as its plans have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from tidewheel import _native

from ...models.spec import DecoderSpec, TowerSpec, tensor_shapes
from ...models.spec.shapes import Shapes, under
from ...weights.dtypes import DType
from ...weights.quantization import GROUP_SIZES, Quantization, TensorFormat, format_of, is_router
from ...weights.tensor import WeightSource

Formats: TypeAlias = Mapping[str, TensorFormat]

_CHUNK = 256  # inputs that a kernel expands at once
_PIECE = 128  # of small floats
_EXPERT = re.compile(r"(.+\.(?:experts\.\d+|shared))\.(gate|up)\.weight")
_LOOKED_UP = ("embed.weight", "embed.positions", "embed.per_layer")


def formats_of(
    spec: DecoderSpec, dtype: DType, quantization: Quantization | None, weights: WeightSource | None = None
) -> Formats:
    """The formats of all matrices, by the names of their tensors.

    Without a quantization, what is quantized in `weights` keeps its format where the kernels have it.
    """
    formats: dict[str, TensorFormat] = {}
    for name, shape in tensor_shapes(spec).items():
        if len(shape) == 2:
            stored = None if quantization is not None else _kept_format(name, shape, weights)
            formats[name] = format_of(name, shape, dtype, quantization, stored, len(spec.layers), tied=spec.head.tied)
    for name, format in list(formats.items()):
        pair = interleaved_with(name)
        if pair is not None and formats.get(pair, format) != format:
            formats[name] = formats[pair] = TensorFormat(dtype)
    return formats


def tower_formats(
    spec: TowerSpec, dtype: DType, quantization: Quantization | None, weights: WeightSource | None = None
) -> Formats:
    """The same for a tower. Its projections are floats, because little of the work is theirs."""
    formats = {f"{name}.weight": TensorFormat(dtype) for name, _ in spec.projections}
    for index, layer in enumerate(spec.layers):
        for residual in layer:
            for name, shape in under(f"layers.{index}", residual.shapes(spec.hidden_size)).items():
                if len(shape) == 2:
                    stored = None if quantization is not None else _kept_format(name, shape, weights)
                    formats[name] = format_of(name, shape, dtype, quantization, stored, len(spec.layers))
    return formats


def interleaved_with(name: str) -> str | None:
    """The weight that is packed into one matrix with an expert's gate or up, so that both must have one format."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else f"{found[1]}.{'up' if found[2] == 'gate' else 'gate'}.weight"


def _kept_format(name: str, shape: tuple[int, ...], weights: WeightSource | None) -> TensorFormat | None:
    stored = None if weights is None else weights.stored_format(name)
    return None if stored is None or why_not_kept(name, shape, stored) is not None else stored


def why_not_kept(name: str, shape: tuple[int, ...], stored: TensorFormat) -> str | None:
    """In words, why the kernels cannot compute with a quantized matrix as it is stored; None: they can."""
    if is_router(name):
        return "routers are kept in float32"
    if stored.input_order is not None and name in _LOOKED_UP:
        return "the inputs of an embedding cannot have an order of their own"
    small = stored.is_small_floats and stored.kind != "nvfp4"
    if small and small_float_group(stored.group_size, shape[1]) is None:
        return f"their groups are of 32, 64 or a multiple of 128 inputs, or whole rows, not of {stored.group_size}"
    if stored.kind == "grid" and grid_group(stored.group_size, shape[1]) is None:
        return f"groups are of 32, 64, 128 or a multiple of 256 inputs, or whole rows, not of {stored.group_size}"
    return None


def grid_group(group_size: int, inputs: int) -> int | None:
    """How many of the inputs share a scale as the kernels count; None if they have no such groups."""
    if group_size in GROUP_SIZES or group_size % _CHUNK == 0:
        return group_size
    return -(-inputs // _CHUNK) * _CHUNK if group_size >= inputs else None


def small_float_group(group_size: int, inputs: int) -> int | None:
    """The same of floats of 8 bits, and of 4 bits by a table."""
    if group_size in (32, 64) or group_size % _PIECE == 0:
        return group_size
    return -(-inputs // _PIECE) * _PIECE if group_size >= inputs else None


def plan_formats(formats: Formats, shapes: Shapes) -> dict[str, _native.WeightFormat]:
    """The formats as a plan has them, of matrices of these `shapes`. Raises ValueError for one without kernels."""
    return {name: _weight_format(format, shapes[name][1]) for name, format in formats.items()}


def input_orders(formats: Formats) -> dict[str, list[int]]:
    """The orders of inputs that are not the model's, by the names of the matrices."""
    return {
        name: format.input_order.indices.tolist() for name, format in formats.items() if format.input_order is not None
    }


def _weight_format(format: TensorFormat, inputs: int) -> _native.WeightFormat:
    if format.kind == "e4m3" or format.kind == "table4":
        group = small_float_group(format.group_size, inputs)
        if group is None:
            raise ValueError(f"there are no kernels for {format}")
        table, scales = list(format.table or ()), list(format.scale_table or ())
        return _native.WeightFormat(format.kind, group, table=table, scale_table=scales, scale_run=format.scale_run)
    if format.kind != "grid":
        return _native.WeightFormat(format.kind, format.group_size, format.zero_points)
    group = grid_group(format.group_size, inputs)
    if group is None:
        raise ValueError(f"there are no kernels for {format}")
    return _native.WeightFormat("grid", group, format.zero_points, format.bits, format.scales)
