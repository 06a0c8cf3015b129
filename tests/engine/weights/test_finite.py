"""Numbers that are not finite are found wherever they are, and nothing else is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import device_ids, load, make_device
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import finite
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.finite import require_finite
from tidewheel.engine.weights.quantization import Quantization
from tidewheel.engine.weights.tensor import DenseTensor

DTYPES: dict[DType, tuple[str, int]] = {"float32": ("u4", 23), "float16": ("u2", 10), "bfloat16": ("u2", 7)}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@settings(deadline=None)
@given(st.sampled_from(list(DTYPES)), st.sampled_from("<>"), st.booleans(), st.data())
def test_every_pattern_of_bits(dtype: DType, order: str, transposed: bool, data: st.DataObject) -> None:
    kind, mantissa = DTYPES[dtype]
    bits = 8 * int(kind[1])
    patterns = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=30))
    infinity = (1 << bits - 1) - (1 << mantissa)
    expected = sum(pattern & (2 ** (bits - 1) - 1) >= infinity for pattern in patterns)
    stored = np.array([patterns, patterns], np.dtype(kind).newbyteorder(order))
    if dtype != "bfloat16":
        stored = stored.view(np.dtype(f"f{kind[1]}").newbyteorder(order))
    tensor = DenseTensor(stored.T if transposed else stored, dtype, origin="file: tensor w")
    require_finite([DenseTensor(stored, dtype)])  # which no file holds
    if expected:
        values = f"{2 * expected} values that are not finite"
        with pytest.raises(ModelError, match=f"^file: tensor w has {values}"):
            require_finite([tensor])
    else:
        require_finite([tensor])


def test_all_pieces_are_looked_at_and_the_first_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_PIECE", 7)
    tensors = [DenseTensor(np.zeros((5, 5), np.float32), "float32", origin=f"tensor {i}") for i in range(6)]
    for i in (4, 2):
        tensors[i].data[4, 4] = -math.inf
        with pytest.raises(ModelError, match=f"^tensor {i} has 1 value that is not finite"):
            require_finite(tensors, threads=3)


@pytest.mark.parametrize("device_id", device_ids()[:2])
@pytest.mark.parametrize("tied", [False, True])
def test_any_tensor_of_a_checkpoint(device_id: str, tied: bool, tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    what, random = describe(config), np.random.default_rng(0)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        what.tensors[name].name: random.standard_normal(shape, np.float32)
        for name, shape in tensor_shapes(what.spec).items()
    }
    formats = [None] if device_id == "torch" else [None, Quantization("int8"), Quantization("int4-fast")]
    for i, name in enumerate(tensors):
        last = tensors[name].flat[-1]
        tensors[name].flat[-1] = (math.nan, math.inf, -math.inf)[i % 3]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} has 1 value that is not finite"):
            load(make_device(device_id), tmp_path, quantization=formats[i % len(formats)])
        tensors[name].flat[-1] = last
    save_file(tensors, tmp_path / "model.safetensors")
    load(make_device(device_id), tmp_path).close()
