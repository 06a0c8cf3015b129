"""The native quantizer: how small its errors are, that they depend on the row alone, and what it refuses."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("tidewheel._native")

from tidewheel import _native
from tidewheel.engine.weights.block_mix import block_kind
from tidewheel.engine.weights.block_types import BLOCK_TYPES, BlockKind, dequantize
from tidewheel.engine.weights.quantizing import quantize
from tidewheel.engine.weights.tensor import DenseTensor

Floats = NDArray[np.float32]

_TYPES = {kind.name.lower(): kind for kind in BLOCK_TYPES.values()}
KINDS: list[BlockKind] = [
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
]  # fmt: skip
# The mean square of the errors for normally distributed numbers, relative to theirs. Rounding to the nearest in steps
# that span the values has 0.0087 with 4 bits, 0.0023 with 5 and 0.000033 with 8.
BOUNDS: dict[BlockKind, float] = {
    "q4_0": 7.1e-3, "q4_1": 5.1e-3, "q5_0": 1.75e-3, "q5_1": 1.25e-3, "q8_0": 2.5e-5, "q2_k": 7.4e-2, "q3_k": 2.25e-2,
    "q4_k": 5.2e-3, "q5_k": 1.28e-3, "q6_k": 2.9e-4, "iq4_nl": 5.8e-3, "iq4_xs": 5.9e-3,
}  # fmt: skip


def rows(count: int = 32, inputs: int = 512, seed: int = 3) -> Floats:
    return np.random.default_rng(seed).normal(0, 0.05, (count, inputs)).astype(np.float32)


def after(
    kind: BlockKind, x: Floats, importance: Floats | None = None, *, thorough: bool = False, isa: str = "auto"
) -> Floats:
    """What is left of the numbers."""
    blocks = _native.quantize(kind, x, "float32", importance, 1, thorough, isa)
    return dequantize(blocks, _TYPES[kind]).reshape(x.shape)


def error(kind: BlockKind, x: Floats, importance: Floats | float = 1.0, of: Floats | None = None) -> float:
    difference = (after(kind, x) if of is None else of) - x
    return float((importance * difference**2).sum() / (importance * x**2).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_small(kind: BlockKind) -> None:
    assert error(kind, rows()) < BOUNDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_thorough_search_finds_less_error(kind: BlockKind) -> None:
    x = rows()
    assert error(kind, x, of=after(kind, x, thorough=True)) < error(kind, x)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_matter_have_less_error(kind: BlockKind) -> None:
    x = rows()
    importance = np.geomspace(1e-2, 1, x.shape[1], dtype=np.float32)
    np.random.default_rng(1).shuffle(importance)
    assert error(kind, x, importance, after(kind, x, importance)) < error(kind, x, importance)
    # Only the ratios count.
    assert np.array_equal(after(kind, x, importance * 1024), after(kind, x, importance))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_depend_neither_on_threads_nor_on_the_level(kind: BlockKind) -> None:
    x = rows(300)
    expected = _native.quantize(kind, x, isa="scalar")
    for level in _native.available_isa_levels():
        assert np.array_equal(_native.quantize(kind, x, threads=3, isa=level), expected)
    # Nor on what lies beside a row.
    assert np.array_equal(_native.quantize(kind, x[7:8]), expected[7:8])


@pytest.mark.parametrize("kind", KINDS)
def test_all_types_of_floats_are_read(kind: BlockKind) -> None:
    half = rows().astype(np.float16)
    bfloat16 = (rows().view(np.uint32) >> 16).astype(np.uint16)
    as_float32 = (bfloat16.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(_native.quantize(kind, half, "float16"), _native.quantize(kind, half.astype(np.float32)))
    assert np.array_equal(_native.quantize(kind, bfloat16, "bfloat16"), _native.quantize(kind, as_float32))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_out_of_the_ordinary(kind: BlockKind) -> None:
    x = np.zeros((8, 256), np.float32)
    assert not after(kind, x).any()
    x[0, 100] = 3  # one outlier
    x[1], x[2] = 0.75, -0.75
    x[3] = np.geomspace(1e-8, 1e-3, 256)
    x[4] = np.linspace(2, 2.001, 256)
    x[5, ::2], x[5, 1::2] = 1, -1
    x[6] = 1e-41  # subnormal: no scale is as small
    x[7] = 1e38  # no scale is as large
    left = after(kind, x)
    assert np.isfinite(left).all()
    assert left[0, 100] == pytest.approx(3, rel=0.05)
    assert np.abs(np.delete(left[0], 100)).max() < 0.03
    for row in (1, 2, 4, 5):
        assert np.abs(left[row] - x[row]).max() < 0.15 * np.abs(x[row]).max()
    assert np.abs(left[3] - x[3]).max() < 5e-4
    assert np.abs(left[6]).max() < 1e-6
    assert left[7].min() >= 65504


def test_a_tensor_in_any_order_of_bytes() -> None:
    x = rows(300)
    tensor = DenseTensor(x.astype(x.dtype.newbyteorder()).T.copy().T, "float32")
    blocks = quantize(tensor, "q4_k", threads=2)
    assert blocks.shape == x.shape
    assert np.array_equal(blocks.data, _native.quantize("q4_k", x))


@pytest.mark.parametrize(
    ("kind", "x", "importance", "said"),
    [
        ("q9_k", rows(), None, "no blocks of the type q9_k"),
        ("nvfp4", rows(), None, "no blocks of the type nvfp4"),
        ("mxfp4", rows(), None, "nothing is quantized to mxfp4"),
        ("q4_k", rows(inputs=288), None, "q4_k needs rows of a multiple of 256 numbers, not 288"),
        ("q4_0", rows(inputs=48), None, "q4_0 needs rows of a multiple of 32 numbers, not 48"),
        ("q4_k", np.where(np.arange(512) == 400, np.inf, rows(300)), None, "row 0 has numbers that are not finite"),
        ("q8_0", np.where(np.arange(512) == 400, np.nan, rows(300)), None, "row 0 has numbers that are not finite"),
        ("q4_k", rows(), np.ones(256), "importance must have a number for each input"),
        ("q4_k", rows(), np.full(512, -1), "importance must be finite and not below 0"),
        ("q4_k", rows(), np.full(512, np.nan), "importance must be finite and not below 0"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    kind: str, x: NDArray[np.generic], importance: NDArray[np.generic] | None, said: str
) -> None:
    weights = None if importance is None else importance.astype(np.float32)
    with pytest.raises(ValueError, match=said):
        _native.quantize(kind, x.astype(np.float32), importance=weights)


tied_kind = functools.partial(block_kind, tied=True)


def test_values_and_the_way_out_of_an_mlp_have_more_bits_in_some_layers() -> None:
    for name in ("v", "down", "experts.3.down"):
        kinds = [tied_kind("q4_k_m", f"layers.{layer}.{name}.weight", 512, 16) for layer in range(16)]
        assert {layer for layer, kind in enumerate(kinds) if kind == "q6_k"} == {0, 1, 4, 7, 10, 13, 14, 15}
        assert set(kinds) == {"q4_k", "q6_k"}
    assert tied_kind("q4_k_m", "layers.0.q.weight", 512, 16) == "q4_k"
    assert tied_kind("q4_k_m", "embed.weight", 512, 16) == "q6_k"
    assert block_kind("q4_k_m", "embed.weight", 512, 16, tied=False) == "q4_k"
    assert block_kind("q4_k_m", "head.weight", 512, 16, tied=False) == "q6_k"


def test_int4_has_more_bits_for_all_values_and_fewer_for_heads() -> None:
    assert {tied_kind("int4", f"layers.{layer}.v.weight", 512, 16) for layer in range(16)} == {"q6_k"}
    assert tied_kind("int4", "layers.2.down.weight", 512, 16) == tied_kind(
        "int4", "layers.2.q.weight", 512, 16, tied=True
    )
    assert tied_kind("int4", "embed.weight", 512, 16) == "q5_k"
    assert tied_kind("int4", "embed.weight", 576, 16) == tied_kind("int4", "layers.2.q.weight", 576, 16) == "q5_1"


def test_what_is_no_whole_super_blocks_has_blocks_of_32() -> None:
    name = "layers.4.q.weight"
    assert tied_kind("q4_k_m", name, 576, 30) == "q5_0"
    assert tied_kind("q5_k_m", name, 576, 30) == "q5_1"
    assert tied_kind("q6_k", name, 576, 30) == "q8_0"
    assert tied_kind("q8_0", name, 576, 30) == "q8_0"
    assert tied_kind("q4_k_m", name, 40, 30) is None
