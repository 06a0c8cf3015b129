"""Quantized weights on chips: their products and rows, on one and on several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine.weights.stored_tensors import KINDS, SOME_KINDS, StoredWeights, decoder, stored
from harness import Harness
from samples import swept

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.grouped_weights import grouped
from tidewheel.engine.models.spec import ExpertsSpec

jax = pytest.importorskip("jax")
pytest.importorskip("torch")

TOKENS = [5, 9, 60, 3]


@pytest.mark.parametrize("kind", [kind if kind in SOME_KINDS else swept(kind) for kind in KINDS])
def test_products_and_rows_are_those_of_the_dequantized_matrix(kind: str) -> None:
    from tidewheel.engine.devices.tpu.grouped import place
    from tidewheel.engine.devices.tpu.mesh import make_mesh, replicated

    matrix, sharding = grouped(stored(kind, (40, 512), kind)), replicated(make_mesh(1))
    x = np.random.default_rng(1).standard_normal((3, 512), np.float32)
    expected = x @ matrix.dequantize().T
    order = slice(None) if matrix.input_order is None else matrix.input_order
    in_order = matrix.dequantize()[:, order]
    kept = place([matrix], "float32", sharding, is_stack=False, is_table=False)
    np.testing.assert_allclose(kept.multiply(x), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(kept.weights(), in_order.T, rtol=2.0**-22, atol=1e-7)
    if matrix.input_order is None:
        table = place([matrix], "bfloat16", sharding, is_stack=False, is_table=True)
        rows = table.rows(jax.numpy.array([7, 0, 7])).astype("float32")
        np.testing.assert_allclose(rows, matrix.dequantize()[[7, 0, 7]], rtol=2.0**-8)
        np.testing.assert_allclose(table.multiply(x), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_devices", [2, swept(1), swept(4)])
def test_a_quantized_model_gives_the_logits_of_its_dequantized_weights(num_devices: int) -> None:
    from engine.devices.tpu.making import OPTIONS, load

    spec = decoder(tied=False, num_layers=1)
    experts = replace(spec.layers[0][1], mixer=ExpertsSpec(4, 4, 256))
    spec = replace(spec, layers=(*spec.layers, (experts,)))
    weights = StoredWeights(spec, *SOME_KINDS)
    # One format each, or they are dequantized.
    weights.kinds |= {name: "awq" if ".down." in name else "q4_k" for name in weights.kinds if ".experts." in name}
    options = replace(OPTIONS, kv_cache_bytes=1 << 20)
    reference = get_device("torch").load(spec, weights, options)
    executor = load(spec, weights, num_devices)
    computed, expected = (Harness(one).logits(TOKENS) for one in (executor, reference))
    np.testing.assert_allclose(computed, expected, rtol=5e-3, atol=5e-3)
    executor.close()
