"""Weights of any stored type reach the device in its dtype, or are refused by name."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from engine.devices.made_models import MLP, NORM, PLAIN, RandomWeights, decoder
from harness import Harness

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.weights.dtypes import bfloat16_bits
from tidewheel.engine.weights.tensor import DenseTensor, QuantizedTensor, WeightTensor

torch = pytest.importorskip("torch")

from engine.devices.graph.loading import load  # noqa: E402

from tidewheel.engine.devices.graph.weights import Weights  # noqa: E402

SPEC = decoder(PLAIN)
TOKENS = [5, 9, 60, 3]


class QuantizedWeights(RandomWeights):
    """Two matrices in 8 bits, or what these mean."""

    def __init__(self, spec: DecoderSpec, dequantized: bool) -> None:
        super().__init__(spec)
        self._dequantized = dequantized

    def __getitem__(self, name: str) -> WeightTensor:  # type: ignore[override]
        if not name.endswith((".up.weight", ".gate.weight")):
            return super().__getitem__(name)
        outputs, inputs = MLP.intermediate_size, SPEC.hidden_size
        codes = np.random.default_rng(len(name)).integers(0, 256, (outputs, inputs)).astype(np.uint8)
        scales = DenseTensor(np.full((outputs, inputs // 32), 0.002, np.float32), "float32")
        tensor = QuantizedTensor((outputs, inputs), "int", 8, 32, codes, scales, origin=name)
        return DenseTensor(tensor.dequantize(), "float32") if self._dequantized else tensor


def test_quantized_weights_are_dequantized_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    expected = Harness(load((SPEC, QuantizedWeights(SPEC, dequantized=True)))).logits(TOKENS)
    with caplog.at_level(logging.WARNING):
        executor = load((SPEC, QuantizedWeights(SPEC, dequantized=False)))
    np.testing.assert_array_equal(Harness(executor).logits(TOKENS), expected)
    (record,) = [record for record in caplog.records if "dequantized" in record.message]
    assert "need as much memory as in float32" in record.message


def test_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    class Broken(RandomWeights):
        def __getitem__(self, name: str) -> DenseTensor:
            tensor = super().__getitem__(name)
            if name == "layers.0.q.weight":
                tensor.data[1, 2] = np.nan
            return DenseTensor(tensor.data, "float32", origin=name)

    with pytest.raises(ModelError, match=r"layers\.0\.q\.weight has 1 value that is not finite"):
        load((SPEC, Broken(SPEC)))


def test_any_storage_is_read_to_the_bit() -> None:
    values = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
    bits = bfloat16_bits(values)
    rounded = torch.from_numpy(bits.astype(np.uint32) << 16).view(torch.float32)
    read_only = values.copy()
    read_only.flags.writeable = False
    tensors = {
        "float32": DenseTensor(read_only, "float32"),
        "other byte order": DenseTensor(values.astype(">f4"), "float32"),
        "transposed": DenseTensor(np.asfortranarray(values), "float32"),
        "bfloat16": DenseTensor(bits, "bfloat16"),
        "bfloat16 of the other byte order": DenseTensor(bits.astype(">u2"), "bfloat16"),
        "float16": DenseTensor(values.astype(np.float16), "float16"),
        "vector": DenseTensor(bits[0], "bfloat16"),
    }
    weights = Weights(tensors.items(), torch.float32, torch.device("cpu"))
    for name in ("float32", "other byte order", "transposed"):
        assert torch.equal(weights[name], torch.from_numpy(values))
    assert torch.equal(weights["bfloat16"], rounded)
    assert torch.equal(weights["bfloat16 of the other byte order"], rounded)
    assert torch.equal(weights["float16"], torch.from_numpy(values.astype(np.float16)).float())
    half = Weights(tensors.items(), torch.bfloat16, torch.device("cpu"))
    assert half["float32"].dtype is torch.bfloat16
    assert torch.equal(half["vector"], rounded[0]), "vectors keep float32"


def test_norms_and_biases_are_where_they_belong() -> None:
    data = {"n.weight": np.array([1.0, 2.0], np.float32), "l.weight": np.eye(2, dtype=np.float32)}
    data["l.bias"] = np.array([1.0, 0.5], np.float32)
    tensors = {name: DenseTensor(array, "float32") for name, array in data.items()}
    weights = Weights(tensors.items(), torch.bfloat16, torch.device("cpu"))
    x = torch.tensor([[3.0, 4.0]])
    norm = weights.norm("n", NORM)(x)
    assert norm.dtype is torch.float32
    np.testing.assert_allclose(norm, np.array([[3, 8]]) / np.sqrt(12.5), rtol=1e-4)
    assert weights.linear("l")(x).tolist() == [[4.0, 4.5]]
    assert weights.linear("l")(x).dtype is torch.bfloat16
