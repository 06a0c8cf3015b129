"""Quantized checkpoints: every method's weights are those of its description, and bad files are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import FORMATS, Array, Format, save

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.finite import require_finite
from tidewheel.engine.weights.tensor import QuantizedTensor, WeightSource, to_float32

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NAMES = {name: ref.name for name, ref in describe(CONFIG).tensors.items()}
UP = "model.layers.0.mlp.up_proj"


def model(format: Format, seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """A checkpoint whose layers' matrices are quantized, and the weights it stands for, by Tidewheel's names."""
    random = np.random.default_rng(seed)
    tensors, weights = {}, {}
    for name, shape in tensor_shapes(describe(CONFIG).spec).items():
        if len(shape) == 2 and name.startswith("layers."):
            parts, weights[name] = format.make(random, *shape)
            tensors |= {NAMES[name].removesuffix("weight") + part: array for part, array in parts.items()}
        else:
            weights[name] = tensors[NAMES[name]] = random.standard_normal(shape, np.float32).astype(np.float16)
    return tensors, weights


def opened(folder: Path, format: Format, tensors: Mapping[str, Array], **fields: Any) -> WeightSource:
    save(folder, {**CONFIG, "quantization_config": {**format.config, **fields}}, tensors)
    source = open_source(str(folder))
    return source.weights(describe(source.config))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_weights_are_the_formats(tmp_path: Path, kind: str) -> None:
    tensors, expected = model(FORMATS[kind])
    weights = opened(tmp_path, FORMATS[kind], tensors)
    assert weights.dtype == "float16"
    for name in weights:
        require_finite([weights[name]])
        np.testing.assert_array_equal(to_float32(weights[name]), expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("kind", "bits"), [("gptq-3-order", 3), ("gptq-2", 2), ("awq", 4), ("packed-8-zeros-order", 8), ("int8", 8)]
)
def test_integers_keep_the_bits_of_the_file(tmp_path: Path, kind: str, bits: int) -> None:
    tensor = opened(tmp_path, FORMATS[kind], model(FORMATS[kind])[0])["layers.0.up.weight"]
    assert isinstance(tensor, QuantizedTensor)
    assert tensor.bits == bits
    assert tensor.codes.nbytes == 160 * 64 * bits // 8
