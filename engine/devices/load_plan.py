"""LoadPlan: what a device will have in memory of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from ..models.spec import DecoderSpec, tensor_shapes
from ..models.spec.shapes import Shapes
from ..weights.dtypes import DType
from ..weights.quantization import Quantization, TensorFormat, format_of

_VECTOR = TensorFormat("float32")


class LoadPlan(Struct, frozen=True):
    """What a device will have in memory of a model. It is decided once, before any weight is read.

    `formats` are the formats of all matrices, by name; vectors are float32. The weights `in_files` stay in the
    checkpoint's mapped files, and take no additional memory. If they were asked for and there are none, `why_packed`
    says why. `weight_bytes` is what all others take, without padding.
    """

    formats: Mapping[str, TensorFormat]
    weight_bytes: int
    in_files: frozenset[str] = frozenset()
    why_packed: str | None = None


def load_plan(
    spec: DecoderSpec,
    formats: Mapping[str, TensorFormat],
    in_files: frozenset[str] = frozenset(),
    why_packed: str | None = None,
) -> LoadPlan:
    """The plan for a spec whose matrices have these `formats`."""
    return LoadPlan(formats, weight_bytes(tensor_shapes(spec), formats, in_files), in_files, why_packed)


def dense_plan(spec: DecoderSpec, dtype: DType, quantization: Quantization | None = None) -> LoadPlan:
    """The plan of a device that has all matrices in `dtype`, or quantizes them, however they are stored."""
    matrices = [(name, shape) for name, shape in tensor_shapes(spec).items() if len(shape) > 1]
    layers, tied = len(spec.layers), spec.head.tied
    formats = {
        name: format_of(name, shape, dtype, quantization, num_layers=layers, tied=tied) for name, shape in matrices
    }
    return load_plan(spec, formats)


def weight_bytes(shapes: Shapes, formats: Mapping[str, TensorFormat], without: Collection[str] = ()) -> int:
    """Bytes of the weights of these `shapes`, in their `formats` or float32."""
    return sum(formats.get(name, _VECTOR).num_bytes(shape) for name, shape in shapes.items() if name not in without)
