"""Weights from a checkpoint to the chips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from ...cancellation import Cancellation
from ...models.spec import AttentionSpec, DecoderSpec, mixers, tensor_shapes
from ...weights.dtypes import DType, bfloat16_bits
from ...weights.quantization import is_router
from ...weights.tensor import DenseTensor, WeightSource, to_float32
from ..grouped_plan import LOOKED_UP, read_grouped
from ..grouped_weights import GroupedMatrix
from ..load_plan import LoadPlan
from .grouped import Grouped, place
from .mesh import weight_sharding
from .mixers import Params
from .stacks import stacked


def place_weights(
    spec: DecoderSpec, weights: WeightSource, plan: LoadPlan, dtype: DType, mesh: Mesh, cancellation: Cancellation
) -> Params:
    """All weights that `spec` needs, divided among the chips: matrices as planned, vectors and routers in float32.

    A spec with more KV heads than the checkpoint (see `with_heads_for`) has each head several times. Raises ModelError
    for weights that are not finite, and LoadCancelledError.
    """
    head_dims = {
        f"layers.{index}": mixer.head_dim
        for index, layer in enumerate(spec.layers)
        for mixer in mixers(layer)
        if isinstance(mixer, AttentionSpec)
    }
    shapes = tensor_shapes(spec)
    stacks = stacked(shapes)
    array_of = {name: array for array, names in stacks.items() for name in names}
    placed: dict[str, Any] = {}
    waiting: dict[str, dict[str, NDArray[Any] | GroupedMatrix]] = {}
    for name, tensor in read_grouped(weights, plan.formats, cancellation):
        own: NDArray[Any] | GroupedMatrix
        if isinstance(tensor, GroupedMatrix):
            own = tensor
            if own.shape != shapes[name]:
                rows = _repeat_heads(np.arange(own.shape[0]), shapes[name][:1], head_dims[_layer(name)])
                own = own.rows(rows)
        else:
            own = _array(tensor, dtype if len(shapes[name]) == 2 and not is_router(name) else "float32")
            if own.shape != shapes[name]:
                own = _repeat_heads(own, shapes[name], head_dims[_layer(name)])
        array = array_of[name]
        parts = waiting.setdefault(array, {})
        parts[name] = own
        if len(parts) == len(stacks[array]):
            in_order = [parts[part] for part in stacks[array]]
            placed[array] = _placed(array, in_order, dtype, mesh, is_stack=stacks[array] != [array])
            del waiting[array]
    return placed


def _placed(
    name: str, parts: Sequence[NDArray[Any] | GroupedMatrix], dtype: DType, mesh: Mesh, *, is_stack: bool
) -> jax.Array | Grouped:
    first = parts[0]
    shape = (len(parts), *reversed(first.shape)) if is_stack else first.shape
    sharding = weight_sharding(mesh, name, shape)
    matrices = [part for part in parts if isinstance(part, GroupedMatrix)]
    if matrices:  # a plan has one format for all of a stack
        return place(matrices, dtype, sharding, is_stack=is_stack, is_table=name in LOOKED_UP)
    arrays = [part for part in parts if not isinstance(part, GroupedMatrix)]
    return jax.device_put(np.stack([array.T for array in arrays]) if is_stack else arrays[0], sharding)


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _array(tensor: DenseTensor, dtype: DType) -> NDArray[np.generic]:
    if dtype == "float32":
        return to_float32(tensor)
    if tensor.dtype == "bfloat16":
        return np.ascontiguousarray(tensor.data, np.uint16).view(jnp.bfloat16)  # the bits as they are
    return bfloat16_bits(to_float32(tensor)).view(jnp.bfloat16)


def _repeat_heads(array: NDArray[Any], shape: tuple[int, ...], head_dim: int) -> NDArray[Any]:
    by_head = array.reshape(-1, head_dim, *array.shape[1:])
    return np.repeat(by_head, shape[0] // array.shape[0], axis=0).reshape(shape)
