"""Which weights accelerators keep in groups, and reading them so."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ..cancellation import Cancellation
from ..models.spec import DecoderSpec, tensor_shapes
from ..weights.dtypes import DType
from ..weights.finite import read_finite
from ..weights.quantization import Quantization, TensorFormat, format_of, is_router, stays_in_floats
from ..weights.tensor import DenseTensor, WeightSource
from .grouped_weights import RUN, WHOLE_ROW, GroupedMatrix, layout_of, num_bytes, tensor_shape
from .grouping import as_planned
from .load_plan import LoadPlan

logger = logging.getLogger(__name__)

LOOKED_UP = ("embed.weight", "embed.per_layer")
_MIN_GROUP = 16
_BY_INPUTS = (".o.weight", ".down.weight", ".latent_o.weight")  # what accelerators that share a model divide by inputs
_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(.+)")


def grouped_plan(
    spec: DecoderSpec,
    weights: WeightSource,
    dtype: DType,
    quantization: Quantization | None,
    *,
    num_parts: int = 1,
    in_floats: Collection[str] = (),
    bytes_of: Callable[[TensorFormat, tuple[int, ...]], int] = num_bytes,
) -> LoadPlan:
    """The plan of a device that keeps quantized matrices as GroupedMatrix, and all others in `dtype`.

    `num_parts` accelerators share the model. What they would divide within a group is dequantized, and so are the
    matrices of a layer's experts that would be one stack, if their formats differ, and what is named `in_floats`.
    `bytes_of` says what a weight needs.
    """
    shapes, formats, total = tensor_shapes(spec), dict[str, TensorFormat](), 0
    stacks: dict[str, set[TensorFormat]] = {}
    for name, shape in shapes.items():
        stored = weights.stored_format(name) if quantization is None and len(shape) == 2 else None
        format = format_of(name, shape, dtype, quantization, stored, len(spec.layers), tied=spec.head.tied)
        if name in in_floats or why_not_grouped(name, shape, format, num_parts) is not None:
            format = TensorFormat("float32" if is_router(name) else dtype)
        if len(shape) > 1:
            formats[name] = format
        if (stack := _stack_of(name)) is not None:
            stacks.setdefault(stack, set()).add(format)
    for name, shape in shapes.items():
        stack = _stack_of(name)
        if stack is not None and len(stacks[stack]) > 1 and len(shape) > 1:
            formats[name] = TensorFormat(dtype)
        total += bytes_of(formats.get(name, TensorFormat("float32")), shape)
    return LoadPlan(formats, total)


def why_not_grouped(name: str, shape: Sequence[int], format: TensorFormat, num_parts: int = 1) -> str | None:
    """In words, why accelerators do not keep a matrix in its quantized format; None: they do, or it has none."""
    layout = layout_of(format)
    if layout is None:
        return None
    if is_router(name):
        return "routers are kept in float32"
    if stays_in_floats(name):
        return "they are taken apart"
    if format.input_order is not None and name in LOOKED_UP:
        return "the inputs of an embedding cannot have an order of their own"
    inputs, group = shape[1], layout.group_size
    if format.kind == "int8" and inputs % group:
        return f"{inputs} inputs are no whole groups of {group}"
    if group < inputs and (group < _MIN_GROUP or group & (group - 1)):
        return f"groups are of 16, 32, 64 or another power of two of inputs, or whole rows, not of {group}"
    if num_parts > 1 and name.endswith(_BY_INPUTS):
        together = max(RUN, 1 if group >= inputs else group * (layout.run if layout.run < WHOLE_ROW else 1))
        if format.input_order is not None or inputs // num_parts % together:
            return f"{num_parts} accelerators would divide them within a group"
    return None


def read_grouped(
    weights: WeightSource, formats: Mapping[str, TensorFormat], cancellation: Cancellation
) -> Iterator[tuple[str, DenseTensor | GroupedMatrix]]:
    """All weights in the `formats` of a plan, each checked when it is read. What is dequantized is logged.

    Raises what `read_finite` raises.
    """
    dequantized: Counter[str] = Counter()
    for name, tensor in read_finite(weights, cancellation):
        format = formats.get(name)
        stored = None if isinstance(tensor, DenseTensor) else tensor.stored_format
        if stored is not None and stored != format:
            reason = why_not_grouped(name, tensor_shape(tensor), stored)
            if reason is None and format is not None and layout_of(format) is not None:
                reason = "--quantization converts them"
            dequantized[reason or "accelerators would divide their groups, or use them in several ways"] += 1
        yield name, as_planned(tensor, format, cancellation)
    for reason, count in dequantized.items():
        logger.info("%d quantized matrices are dequantized as they are read: %s", count, reason)


def _stack_of(name: str) -> str | None:
    """What the matrices of a layer's experts have in common that are computed together."""
    found = _OF_EXPERT.fullmatch(name)
    return None if found is None else f"{found[1]}.{found[2]}"
