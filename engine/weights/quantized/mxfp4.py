"""MXFP4 checkpoints (`quant_method: mxfp4`), as gpt-oss has them (https://arxiv.org/abs/2508.10925): the matrices of
experts are in 4 bits, and all else is in floats.

The E matrices `[N, K]` of `experts.down_proj` are `experts.down_proj_blocks [E, N, K / 32, 16]`, two numbers of e2m1 a
byte, the first in the low nibble, and `experts.down_proj_scales [E, N, K / 32]`, whose powers of two (e8m0) the numbers
are multiplied by. In floats, the same checkpoint has `experts.down_proj [E, K, N]`.
"""

from __future__ import annotations

from ...models.config import ConfigReader
from ..quantization import TensorFormat
from ..small_floats import MXFP4_GROUP, SmallFloatTensor
from ..stored import StoredMatrix
from .layer import LayerTensors
from .small_floats import mxfp4


class Mxfp4:
    """The reader of experts in MXFP4. Their tensors tell all that matters, so the config is not looked at."""

    name = "mxfp4"
    works = "experts of gpt-oss"
    refused = ""

    def __init__(self, config: ConfigReader) -> None:
        pass

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """None: layers that are not experts are not quantized."""
        return None

    def expert(self, experts: LayerTensors, name: str, index: int) -> StoredMatrix | None:
        """The matrix of expert `index`, with outputs as rows, of the stack `name`; None if it is not quantized."""
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        found = experts.find(blocks)
        if found is None:
            return None
        if len(found.shape) != 4 or 0 in found.shape or found.shape[3] != MXFP4_GROUP // 2:
            raise experts.error(blocks, f"has shape {found.shape}, but must have (experts, outputs, groups, 16)")
        count, outputs, groups, _ = found.shape
        if index >= count:
            raise experts.error(blocks, f"has shape {found.shape}, but the model needs more than {index} experts")
        experts.take(blocks, "U8", shape=found.shape)
        experts.take(scales, "U8", shape=found.shape[:3])
        shape = (outputs, groups * MXFP4_GROUP)

        def read() -> SmallFloatTensor:
            packed = experts.array(blocks)[index].reshape(outputs, -1)
            return mxfp4(packed, experts.array(scales)[index], experts.origin(blocks))

        return experts.small_floats(shape, (self.name, name, index), read, lambda: TensorFormat("mxfp4"))
