"""Weights of any stored type reach the device in its dtype, or are refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from engine.devices.made_models import NORM, PLAIN, RandomWeights, decoder
from engine.weights.stored_tensors import KINDS, SOME_KINDS, StoredWeights, stored
from engine.weights.stored_tensors import decoder as stored_decoder
from harness import Harness

from tidewheel.engine.devices.grouping import grouped
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models.spec import ExpertsSpec
from tidewheel.engine.weights.dtypes import bfloat16_bits
from tidewheel.engine.weights.quantization import Quantization
from tidewheel.engine.weights.tensor import DenseTensor

torch = pytest.importorskip("torch")

from engine.devices.graph.loading import load  # noqa: E402

from tidewheel.engine.devices.graph.grouped import Grouped  # noqa: E402
from tidewheel.engine.devices.graph.weights import Weights  # noqa: E402

SPEC = decoder(PLAIN)
TOKENS = [5, 9, 60, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_quantized_weights_keep_their_numbers_and_their_memory(dtype: torch.dtype) -> None:
    device, x = torch.device("cpu"), torch.randn(3, 2, 512).to(dtype)
    for kind in KINDS:
        tensor = stored(kind, (40, 512), kind)
        matrix = grouped(tensor)
        weights = Weights([("l.weight", matrix)], dtype, device)
        kept = weights.matrix("l.weight")
        assert isinstance(kept, Grouped)
        assert kept.num_bytes == matrix.num_bytes
        rounded = torch.from_numpy(matrix.dequantize()).to(dtype)
        torch.testing.assert_close(weights["l.weight"], rounded, rtol=0, atol=0)
        torch.testing.assert_close(
            weights.table("l.weight")(torch.tensor([[7, 7], [0, 39]])), rounded[torch.tensor([[7, 7], [0, 39]])]
        )
        torch.testing.assert_close(weights.linear("l")(x), torch.nn.functional.linear(x, rounded))


def test_a_quantized_model_gives_the_logits_of_its_dequantized_weights(caplog: pytest.LogCaptureFixture) -> None:
    spec = stored_decoder(tied=False, num_layers=1)
    experts = replace(spec.layers[0][1], mixer=ExpertsSpec(4, 2, 256))
    spec = replace(spec, layers=(*spec.layers, (experts,)))
    weights, floats = (StoredWeights(spec, *SOME_KINDS, dequantized=dequantized) for dequantized in (False, True))
    for made in (weights, floats):  # experts of different formats are dequantized
        made.kinds |= {name: "gptq-3" for name in made.kinds if ".experts." in name}
    expected = Harness(load((spec, floats))).logits(TOKENS)
    with caplog.at_level(logging.INFO):
        executor = load((spec, weights))
    np.testing.assert_allclose(Harness(executor).logits(TOKENS), expected, rtol=1e-3, atol=1e-3)
    assert caplog.text.count("dequantized") == caplog.text.count("1 quantized matrices are dequantized") == 1
    assert "routers are kept in float32" in caplog.text


def test_weights_in_floats_are_quantized_while_they_are_loaded() -> None:
    expected = Harness(load((SPEC, RandomWeights(SPEC)))).logits(TOKENS)
    for method, most in (("fp8", 0.1), ("int8-channel", 0.04), ("int4-fast", 0.4)):
        executor = load((SPEC, RandomWeights(SPEC)), quantization=Quantization(method))
        error = np.abs(Harness(executor).logits(TOKENS) - expected).mean() / np.abs(expected).mean()
        assert 0 < error < most


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
