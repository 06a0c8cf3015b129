"""Weights from a checkpoint to the chips."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from ...cancellation import Cancellation
from ...models.spec import AttentionSpec, DecoderSpec, mixers, tensor_shapes
from ...weights.dtypes import DType, bfloat16_bits
from ...weights.finite import require_finite
from ...weights.quantization import is_router
from ...weights.tensor import DenseTensor, WeightSource, WeightTensor, to_float32
from .mesh import weight_sharding
from .stacks import stacked

logger = logging.getLogger(__name__)


def place_weights(
    spec: DecoderSpec, weights: WeightSource, dtype: DType, mesh: Mesh, cancellation: Cancellation
) -> dict[str, jax.Array]:
    """All weights that `spec` needs, divided among the chips: matrices of `dtype`, vectors and routers of float32.

    A spec with more KV heads than the checkpoint (see `with_heads_for`) has each head several times. Quantized matrices
    become floats, which is logged. Raises ModelError for weights that are not finite, and LoadCancelledError.
    """
    head_dims = {
        f"layers.{index}": mixer.head_dim
        for index, layer in enumerate(spec.layers)
        for mixer in mixers(layer)
        if isinstance(mixer, AttentionSpec)
    }
    placed, num_quantized = {}, 0
    shapes = tensor_shapes(spec)
    for array_name, names in stacked(shapes).items():
        arrays = []
        for name in names:
            cancellation.check()
            tensor, shape = weights[name], shapes[name]
            require_finite([tensor])
            num_quantized += not isinstance(tensor, DenseTensor)
            is_rounded = len(shape) == 2 and not is_router(name)
            array = _array(tensor, dtype if is_rounded else "float32")
            if array.shape != shape:
                array = _repeat_heads(array, shape, head_dims[".".join(name.split(".")[:2])])
            arrays.append(array)
        array = arrays[0] if names == [array_name] else np.stack([array.T for array in arrays])
        placed[array_name] = jax.device_put(array, weight_sharding(mesh, array_name, array.shape))
    if num_quantized:
        logger.warning(
            "%d matrices of the checkpoint are quantized; the tpu device dequantizes them, and they need as much "
            "memory as in %s",
            num_quantized,
            dtype,
        )
    return placed


def _array(tensor: WeightTensor, dtype: DType) -> NDArray[np.generic]:
    if dtype == "float32":
        return to_float32(tensor)
    if isinstance(tensor, DenseTensor) and tensor.dtype == "bfloat16":
        return np.ascontiguousarray(tensor.data, np.uint16).view(jnp.bfloat16)  # the bits as they are
    return bfloat16_bits(to_float32(tensor)).view(jnp.bfloat16)


def _repeat_heads(array: NDArray[np.generic], shape: tuple[int, ...], head_dim: int) -> NDArray[np.generic]:
    by_head = array.reshape(-1, head_dim, *array.shape[1:])
    return np.repeat(by_head, shape[0] // array.shape[0], axis=0).reshape(shape)
