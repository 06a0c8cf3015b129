"""Dummy weights, and the conversions between number formats."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.dtypes import STORAGE, DType, bfloat16_bits, dtype_from_config
from tidewheel.engine.weights.tensor import DenseTensor, to_float32

CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 2000,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}


def dummy(folder: Path, seed: int = 0, **fields: Any) -> Any:
    config = {**CONFIG, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return open_source(str(folder), load_format="dummy", seed=seed).weights(describe(config))


@pytest.mark.parametrize("dtype", STORAGE)
def test_weights_have_the_shapes_the_dtype_and_a_sane_scale(tmp_path: Path, dtype: DType) -> None:
    weights = dummy(tmp_path, dtype=dtype)
    assert weights.dtype == dtype
    for name, shape in tensor_shapes(describe(CONFIG).spec).items():
        tensor = weights[name]
        assert tensor.dtype == dtype
        assert tensor.data.shape == shape
        assert tensor.data.dtype == STORAGE[dtype]
        values = to_float32(tensor)
        if name.endswith("norm.weight"):
            assert (values == 1).all()
        elif name.endswith("norm.bias"):
            assert (values == 0).all()
        else:
            assert np.std(values) == pytest.approx(0.02, rel=0.1)


def test_no_two_rows_of_a_matrix_are_alike(tmp_path: Path) -> None:
    up = to_float32(dummy(tmp_path)["layers.0.up.weight"])
    assert up.size > 2 * 10**6
    assert len(np.unique(up, axis=0)) == len(up)


def test_weights_depend_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    one, same, other = dummy(tmp_path, 1), dummy(tmp_path, 1), dummy(tmp_path, 2)
    np.testing.assert_array_equal(one["layers.1.q.weight"].data, same["layers.1.q.weight"].data)
    assert not np.array_equal(one["layers.1.q.weight"].data, other["layers.1.q.weight"].data)
    assert not np.array_equal(one["layers.1.q.weight"].data, one["layers.0.q.weight"].data)


def test_a_large_model_is_made_in_a_moment(tmp_path: Path) -> None:
    size = {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    start = time.process_time()
    np.random.default_rng(0).standard_normal(10_000_000, np.float32)
    drawn = time.process_time()
    weights = dummy(tmp_path, **size, vocab_size=50000, dtype="bfloat16")
    assert sum(weights[name].data.size for name in weights) > 350e6
    assert time.process_time() - drawn < 5 * (drawn - start), "less than to draw one in seven"


def test_the_dtype_of_a_config() -> None:
    assert dtype_from_config({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert dtype_from_config({"dtype": "float16", "torch_dtype": "bfloat16"}) == "float16"
    assert dtype_from_config({}) == "float32"
    with pytest.raises(ModelError, match="float64"):
        dtype_from_config({"dtype": "float64"})


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120))
def test_bfloat16_is_the_nearest_with_ties_to_even(value: float) -> None:
    bits = int(bfloat16_bits(np.array([value], np.float32))[0])

    def decoded(pattern: int) -> float:
        return float(to_float32(DenseTensor(np.array([pattern], np.uint16), "bfloat16"))[0])

    error = abs(decoded(bits) - value)
    for neighbour in (bits - 1, bits + 1):
        if 0 <= neighbour < 2**16 and np.isfinite(decoded(neighbour)):
            distance = abs(decoded(neighbour) - value)
            assert error < distance or (error == distance and bits % 2 == 0)


def test_a_float32_copy_is_contiguous_and_writable() -> None:
    for dtype in STORAGE:
        data = np.arange(6).reshape(2, 3).astype(STORAGE[dtype]).T
        copy = to_float32(DenseTensor(data, dtype))
        assert copy.shape == (3, 2)
        assert copy.flags.c_contiguous
        assert copy.flags.writeable
