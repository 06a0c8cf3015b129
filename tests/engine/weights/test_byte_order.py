"""Checkpoints are little-endian and machines need not be: every way from a file's bytes to numbers, in both orders."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_weights
from tidewheel.engine.weights.dtypes import STORAGE, DType
from tidewheel.engine.weights.packed_cache import PackedCache
from tidewheel.engine.weights.quantization import Quantization
from tidewheel.engine.weights.tensor import DenseTensor, WeightSource, to_float32

pytest.importorskip("tidewheel._native")
from tidewheel.engine.devices.cpu.device import CpuDevice

# GPT-2 stores its matrices with columns first, and queries, keys and values in one.
MODELS = [
    describe({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 24, "intermediate_size": 44,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }),
    describe({
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 40, "n_embd": 24, "n_layer": 1, "n_head": 2,
        "n_positions": 64,
    }),
]  # fmt: skip
FILE_DTYPES: dict[DType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
OPTIONS = ExecutorOptions(
    dtype="float32", kv_cache_bytes=2**20, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16
)
QUANTIZATIONS = [None, Quantization("int8"), Quantization("int8-channel"), Quantization("int4-fast", 32, True)]


def flipped(data: NDArray[Any]) -> NDArray[Any]:
    """The same numbers with their bytes in the other order."""
    return data.byteswap().view(data.dtype.newbyteorder())


def write_checkpoint(path: Path, tensors: dict[str, NDArray[Any]], dtype: DType, order: str, odd: bool) -> None:
    """A safetensors file by hand, its numbers in `order`. `odd`: they lie at odd places."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        raw = values.astype(STORAGE[dtype].newbyteorder(order)).tobytes()
        header[name] = {
            "dtype": FILE_DTYPES[dtype],
            "shape": values.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((odd - len(text)) % 8)
    path.unlink(missing_ok=True)  # not changed: it may still be mapped
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def random_bits(shape: tuple[int, ...], dtype: DType, random: np.random.Generator) -> NDArray[Any]:
    """Any bits except those of numbers from 2 on."""
    unsigned = np.dtype(f"u{STORAGE[dtype].itemsize}")
    bits = random.integers(0, 2 ** (8 * unsigned.itemsize), shape, np.uint64).astype(unsigned)
    return (bits & ~unsigned.type(1 << (8 * unsigned.itemsize - 2))).view(STORAGE[dtype])


def with_bits(what: Any, dtype: DType, seed: int) -> dict[str, NDArray[Any]]:
    random, stored = np.random.default_rng(seed), dict[str, NDArray[Any]]()
    for name, shape in tensor_shapes(what.spec).items():
        source = what.tensors[name]
        rows = source.rows[1] if source.rows else shape[0]
        whole = (rows, *shape[1:])
        whole = whole[::-1] if source.transpose else whole
        if source.name not in stored or stored[source.name].size < np.prod(whole):
            stored[source.name] = random_bits(whole, dtype, random)
    return stored


class Swapped:
    """A file whose numbers lie in the order that this machine does not have."""

    identity: str | None = None

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self.dtype = weights.dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def stored_format(self, name: str) -> None: ...

    def __getitem__(self, name: str) -> DenseTensor:
        tensor = self._weights[name]
        return dataclasses.replace(tensor, data=tensor.data.view(tensor.data.dtype.newbyteorder()))


def packed(what: Any, weights: WeightSource, dtype: DType, quantization: Quantization | None) -> NDArray[np.uint8]:
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization)
    executor = CpuDevice().load(what.spec, weights, options)
    content = executor.native.packed_weights().copy()
    executor.close()
    return content


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(MODELS),
    st.sampled_from(list(FILE_DTYPES)),
    st.sampled_from(list(FILE_DTYPES)),
    st.sampled_from(QUANTIZATIONS),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_checkpoint_in_the_other_order_is_packed_to_the_same_bits(
    tmp_path: Path, what: Any, stored: DType, dtype: DType, quantization: Quantization | None, odd: bool, seed: int
) -> None:
    tensors = with_bits(what, stored, seed)
    folders = {order: tmp_path / order for order in ("<", ">")}
    for order, folder in folders.items():
        folder.mkdir(exist_ok=True)
        write_checkpoint(folder / "model.safetensors", tensors, stored, order, odd)
    plain = open_weights(folders["<"], what)
    assert all(plain[name].data.dtype == STORAGE[stored].newbyteorder("<") for name in plain)
    assert all(plain[name].mapped != odd for name in plain)
    swapped = Swapped(open_weights(folders[">"], what))
    for name in plain:
        np.testing.assert_array_equal(to_float32(plain[name]), to_float32(swapped[name]))
    np.testing.assert_array_equal(packed(what, plain, dtype, quantization), packed(what, swapped, dtype, quantization))


@settings(deadline=None)
@given(st.sampled_from(list(FILE_DTYPES)), arrays.arrays(np.uint32, arrays.array_shapes(max_dims=2, max_side=5)))
def test_weights_are_the_same_numbers_in_either_order(dtype: DType, bits: NDArray[np.uint32]) -> None:
    data = bits.astype(f"u{STORAGE[dtype].itemsize}").view(STORAGE[dtype])
    for view in (data, data.T, data[::-1]):
        expected, got = (to_float32(DenseTensor(order, dtype)) for order in (view, flipped(view)))
        assert got.dtype.isnative
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1))
def test_a_files_floats_are_what_its_bytes_say(values: list[float]) -> None:
    raw = struct.pack(f"<{len(values)}f", *values)
    stored = np.frombuffer(raw, STORAGE["float32"].newbyteorder("<"))
    np.testing.assert_array_equal(to_float32(DenseTensor(stored, "float32")), np.array(values, np.float32))


def test_packed_weights_of_the_other_order_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = set()
    for order in ("little", "big"):
        monkeypatch.setattr("sys.byteorder", order)
        paths.add(PackedCache("kept", (1, "scalar")).path)
    assert len(paths) == 2
