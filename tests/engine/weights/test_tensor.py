"""Quantized tensors: their numbers follow the format, and devices compute with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from harness import Harness, device_ids, make_device
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from samples import sample

from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights.dtypes import DType, bfloat16_bits
from tidewheel.engine.weights.dummy import DummyWeights
from tidewheel.engine.weights.quantization import TensorFormat
from tidewheel.engine.weights.tensor import DenseTensor, QuantizedTensor, WeightSource, WeightTensor, to_float32

MODEL = describe({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
})  # fmt: skip
OPTIONS = ExecutorOptions(
    dtype="float32", kv_cache_bytes=2**20, max_model_len=64, max_num_seqs=64, max_num_batched_tokens=64
)


def packed(numbers: NDArray[np.integer], bits: int) -> NDArray[np.uint8]:
    """Each row as the bytes of one long integer, whose lowest bits are the first number."""
    rows = []
    for row in numbers.tolist():
        whole = sum((number & (1 << bits) - 1) << (i * bits) for i, number in enumerate(row))
        rows.append(np.frombuffer(whole.to_bytes(-(-len(row) * bits // 8), "little"), np.uint8))
    return np.array(rows)


def floats(values: NDArray[np.float32], dtype: DType, origin: str | None = None) -> DenseTensor:
    return DenseTensor(bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype), dtype, origin=origin)


def quantized(shape: tuple[int, int], seed: int, **fields: object) -> tuple[QuantizedTensor, NDArray[np.integer]]:
    """A tensor of random codes, 4 bits in groups of 32 unless `fields` say otherwise, and the codes as numbers."""
    random = np.random.default_rng(seed)
    format, bits, group_size = fields.pop("format", "uint"), fields.pop("bits", 4), fields.pop("group_size", 32)
    low = -(1 << bits - 1) if format == "int" else 0
    numbers = random.integers(low, low + (1 << bits), shape)
    groups = (shape[0], math.ceil(shape[1] / group_size))
    scales = (random.random(groups, np.float32) - 0.5) / 64
    tensor = QuantizedTensor(
        shape, format, bits, group_size, packed(numbers, bits), floats(scales, fields.pop("dtype", "float32"))
    )
    given = {
        "zeros": random.integers(0, 1 << bits, groups) if fields.get("zeros") else None,
        "input_order": random.permutation(shape[1]) if fields.get("input_order") else None,
    }
    return dataclasses.replace(tensor, **given), numbers


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 40)),
    st.sampled_from(["uint", "int"]),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 45),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_weights_are_the_formulas(
    shape: tuple[int, int], format: str, bits: int, group_size: int, dtype: DType, zeros: bool, ordered: bool, seed: int
) -> None:
    tensor, numbers = quantized(
        shape, seed, format=format, bits=bits, group_size=group_size, dtype=dtype, zeros=zeros, input_order=ordered
    )
    scales, weights = to_float32(tensor.scales), to_float32(tensor)
    assert weights.shape == shape
    assert weights.dtype == np.float32
    for n in range(shape[0]):
        for k in range(shape[1]):
            zero = 0 if tensor.zeros is None else tensor.zeros[n, k // group_size]
            expected = scales[n, k // group_size] * np.float32(numbers[n, k] - zero)
            assert weights[n, k if tensor.input_order is None else tensor.input_order[k]] == expected


def test_known_bytes() -> None:
    codes, scales = np.array([[0x10, 0x8F, 0x07]], np.uint8), floats(np.array([[1.0, 0.5]], np.float32), "float16")
    signed = QuantizedTensor((1, 5), "int", 4, 4, codes, scales)
    assert signed.dequantize().tolist() == [[0, 1, -1, -8, 3.5]]
    unsigned = QuantizedTensor((1, 5), "uint", 4, 4, codes, scales, zeros=np.array([[8, 7]], np.uint8))
    assert unsigned.dequantize().tolist() == [[-8, -7, 7, 0, 0]]
    ordered = dataclasses.replace(unsigned, input_order=np.array([4, 0, 1, 2, 3], np.int32))
    assert ordered.dequantize().tolist() == [[-7, 7, 0, 0, -8]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"codes": np.zeros((2, 5), np.uint8)}, "codes of shape"),
        ({"bits": 8}, "codes of shape"),
        ({"group_size": 2}, "scales and zeros must be"),
        ({"zeros": np.zeros((2, 1), np.uint8)}, "scales and zeros must be"),
        ({"input_order": np.arange(7)}, "each of 8 inputs once"),
        ({"input_order": np.zeros(8, np.int32)}, "each of 8 inputs once"),
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_together_are_an_error(fields: dict[str, object], words: str) -> None:
    tensor, _ = quantized((2, 8), 0, group_size=4)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(tensor, **fields)


class Changed:
    """A model's weights, with its layers' matrices changed."""

    identity: str | None = None
    dtype: DType = "float32"

    def __init__(self, change: Callable[[str, tuple[int, int]], WeightTensor]) -> None:
        self._weights, self._change = DummyWeights(MODEL.spec, self.dtype), change

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def stored_format(self, name: str) -> TensorFormat | None:
        tensor = self[name]
        return None if isinstance(tensor, DenseTensor) else tensor.stored_format

    def __getitem__(self, name: str) -> WeightTensor:
        tensor = self._weights[name]
        return self._change(name, tensor.data.shape) if name.startswith("layers.") and tensor.data.ndim == 2 else tensor


def codes_of(name: str, shape: tuple[int, int]) -> QuantizedTensor:
    tensor, _ = quantized(shape, len(name), zeros=True, input_order=True)
    return dataclasses.replace(tensor, origin=f"model.safetensors: tensor {name}")


def loaded(device_id: str, weights: WeightSource) -> Executor:
    return make_device(device_id).load(MODEL.spec, weights, OPTIONS)


@pytest.mark.parametrize("device_id", sample(device_ids(), (*device_ids()[:2], "cpu-scalar").__contains__))
def test_a_device_may_dequantize_as_it_loads(device_id: str) -> None:
    def in_groups(size: int) -> Callable[[str, tuple[int, int]], QuantizedTensor]:
        def make(name: str, shape: tuple[int, int]) -> QuantizedTensor:
            return quantized(shape, len(name), zeros=True, input_order=True, group_size=size)[0]

        return make

    for size in (16, 32):  # for the first there are no kernels
        make = in_groups(size)
        dense = Changed(lambda name, shape, make=make: DenseTensor(make(name, shape).dequantize(), "float32"))
        kept, floats = (Harness(loaded(device_id, weights)).logits([*range(20)]) for weights in (Changed(make), dense))
        if device_id == "torch" or size == 16:
            np.testing.assert_array_equal(kept, floats)
        else:
            assert 0 < np.square(kept - floats).mean() <= 0.04**2 * np.square(floats).mean()
        assert floats.std() > 0


@pytest.mark.parametrize("device_id", device_ids()[:2])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_is_found(number: float, device_id: str) -> None:
    def broken(name: str, shape: tuple[int, int]) -> QuantizedTensor:
        tensor = codes_of(name, shape)
        scales = to_float32(tensor.scales)
        scales[-1, -1] = number if name == "layers.1.up.weight" else 1.0
        return dataclasses.replace(tensor, scales=floats(scales, "float16", f"model.safetensors: tensor {name}.scales"))

    words = r"^model.safetensors: tensor layers\.1\.up\.weight\.scales has 1 value that is not finite"
    with pytest.raises(ModelError, match=words):
        loaded(device_id, Changed(broken))
