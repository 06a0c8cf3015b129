"""AWQ checkpoints (https://arxiv.org/abs/2306.00978), AutoAWQ's version `gemm`.

A layer `[N, K]` of 4 bits in G groups: `qweight [K, N / 8]`, `qzeros [G, N / 8]`, `scales [G, N]`. The nibbles of a
word, from the lowest on, are its outputs 0, 2, 4, 6, 1, 3, 5, 7. A weight is `scale * (q - zero)`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ...files.wording import shown
from ...models.config import ConfigReader
from ..bits import pack, unpack
from ..stored import FLOATS, StoredMatrix
from ..tensor import DenseTensor, QuantizedTensor
from .groups import no_codes, read_group_size
from .layer import LayerTensors

_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq:
    """The reader of AWQ layers. Raises ModelError for a config that is not supported."""

    name = "awq"
    works = "4 bits, version `gemm`"
    refused = "other versions; weights without zero points"

    def __init__(self, config: ConfigReader) -> None:
        bits = config.raw("bits") if "bits" in config else config.raw("w_bit")
        if bits != 4 or isinstance(bits, bool):
            raise ModelError(f"config.json: AWQ of {shown(bits)} bits is not supported; supported are 4 bits")
        version = config.raw("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise ModelError(
                f"config.json: AWQ's version {shown(version)} is not supported; take a checkpoint of version gemm"
            )
        if not config.flag("zero_point", True):
            raise ModelError("config.json: AWQ without zero points (zero_point: false) is not supported")
        self._group_size = read_group_size(config, "group_size" if "group_size" in config else "q_group_size")

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """The layer's matrix; None if the layer is not quantized."""
        if layer.find("qweight") is None:
            return None
        inputs, words = layer.take("qweight", "I32").shape
        outputs = words * 8
        group_size = self._group_size or inputs
        groups = -(-inputs // group_size)
        layer.take("scales", *FLOATS, shape=(groups, outputs))
        layer.take("qzeros", "I32", shape=(groups, words))
        shape = (outputs, inputs)
        facts = (self.name, group_size)
        return layer.integers(shape, facts, lambda codes: _read(layer, shape, group_size, codes))


def _read(layer: LayerTensors, shape: tuple[int, int], group_size: int, with_codes: bool) -> QuantizedTensor:
    codes = _codes(layer.array("qweight")) if with_codes else no_codes(shape, 4)
    scales = layer.scales("scales")
    return QuantizedTensor(
        shape,
        "uint",
        4,
        group_size,
        codes,
        DenseTensor(scales.data.T, scales.dtype, origin=scales.origin),
        _numbers(layer.array("qzeros")).T,
        origin=layer.origin("qweight"),
    )


def _codes(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Codes `[N, K / 2]`, the first of two in the low half, of words `[K, N / 8]`, without a byte for each of them."""
    inputs, count = words.shape
    if inputs % 8:
        return pack(_numbers(words).T, 4)
    codes = np.zeros((count, 8, inputs // 8), "<u4")
    for i in range(8):
        of_inputs = np.ascontiguousarray(words[i::8].T).view("<u4")
        for output, nibble in enumerate(_NIBBLE_OF_OUTPUT):
            codes[:, output] |= (of_inputs >> np.uint32(4 * nibble) & np.uint32(15)) << np.uint32(4 * i)
    return codes.reshape(8 * count, -1).view(np.uint8)


def _numbers(words: NDArray[Any]) -> NDArray[np.uint8]:
    """`[R, N]` numbers of `[R, N / 8]` words."""
    nibbles = unpack(np.ascontiguousarray(words).view(np.uint8), 4, words.shape[1] * 8)
    return nibbles.reshape(len(words), -1, 8)[:, :, _NIBBLE_OF_OUTPUT].reshape(len(words), -1)
