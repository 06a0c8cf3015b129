"""Every block type means to the bit what the `gguf` package says that it means."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tidewheel.engine.weights.block_types import BLOCK_TYPES, OTHER_TYPES, dequantize

TYPES = {kind.name: number for number, kind in BLOCK_TYPES.items() if kind.parts is not None}
LARGE = next(iter(TYPES))  # of this type there are more blocks than are made at once


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_mean_what_the_package_says(name: str) -> None:
    kind, number = BLOCK_TYPES[TYPES[name]], gguf.GGMLQuantizationType(TYPES[name])
    assert gguf.GGML_QUANT_SIZES[number] == (kind.elements, kind.bytes)
    most = 1 << (20 if name == LARGE else 16)
    count = most // kind.elements + 3
    data = np.random.default_rng(0).integers(0, 256, (count, kind.bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, number).reshape(-1)
    np.testing.assert_array_equal(dequantize(data.reshape(-1), kind), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_what_was_quantized_comes_back(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((4, 256), np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    back = dequantize(np.ascontiguousarray(data).view(np.uint8).reshape(-1), BLOCK_TYPES[TYPES[name]])
    assert np.abs(back.reshape(values.shape) - values).max() < 0.8


def test_the_names_of_all_types_are_the_packages() -> None:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    ours = {number: kind.name for number, kind in BLOCK_TYPES.items()} | OTHER_TYPES
    assert {number: ours.get(number) for number in known} == known
