"""FP8 checkpoints (`quant_method: fp8`): e4m3 with a scale for each block, as DeepSeek V3 has them
(https://arxiv.org/abs/2412.19437), for each output, or for the whole matrix.

A layer `[N, K]`: `weight [N, K]`, and `weight_scale_inv` or `weight_scale`. A weight is e4m3 times its scale.
"""

from __future__ import annotations

from ...models.config import ConfigReader
from ..stored import StoredMatrix
from .layer import LayerTensors
from .small_floats import e4m3_matrix, take_scales


class Fp8:
    """The reader of FP8 layers. Raises ModelError for a config that is not supported.

    Activations are not rounded to FP8, which the checkpoint's `activation_scheme` is about.
    """

    name = "fp8"
    works = "e4m3 for blocks, channels and whole matrices"
    refused = "e5m2"

    def __init__(self, config: ConfigReader) -> None:
        config.refuse("fmt", "e4m3")
        self._block = read_block(config, "weight_block_size")

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """The layer's matrix; None if the layer is not quantized."""
        weight = layer.find("weight")
        if weight is None or not weight.dtype.startswith("F8"):
            return None
        outputs, inputs = layer.take("weight", "F8_E4M3").shape
        shape = (outputs, inputs)
        scale = "weight_scale" if layer.find("weight_scale_inv") is None else "weight_scale_inv"
        block = take_scales(layer, scale, shape, self._block)
        return e4m3_matrix(layer, "weight", scale, shape, block, (self.name, block))


def read_block(config: ConfigReader, name: str) -> tuple[int, int] | None:
    """The outputs and inputs of a block that shares a scale. Raises ModelError."""
    block = config.raw(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in block):
        raise config.error(name, "two positive integers")
    return block[0], block[1]
