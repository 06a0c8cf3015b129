"""Quantized weights on chips: their products and rows, on one and on several."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engine.weights.stored_tensors import KINDS, SOME_KINDS, StoredWeights, decoder, stored
from harness import Harness
from optional_packages import require_packages
from samples import swept

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.grouped_weights import IN_FOUR_BITS
from tidewheel.engine.devices.grouping import grouped
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


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("q4_k", 512),
        ("e4m3-block", 256),
        *(swept(kind, 512) for kind in KINDS if kind not in ("q4_k", "e4m3-block")),
        swept("q4_0", 43 * 64),
        swept("q4_0", 12 * 128),
    ],
)
def test_the_interpreted_kernel_gives_the_products_of_the_weights(
    kind: str, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax.experimental import pallas

    from tidewheel.engine.devices.tpu.grouped import place
    from tidewheel.engine.devices.tpu.grouped_kernel import multiply, tiles_of
    from tidewheel.engine.devices.tpu.mesh import make_mesh, replicated

    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    matrix = grouped(stored(kind, (256, inputs), kind))
    kept = place([matrix], "float32", replicated(make_mesh(1)), is_stack=False, is_table=False)
    in_four = matrix.values in IN_FOUR_BITS
    tiles = tiles_of(32, *kept.codes.shape, inputs, matrix.group_size, in_four=in_four)
    assert tiles is not None
    x = np.random.default_rng(1).standard_normal((32, inputs), np.float32)
    args = (kept.codes, kept.scales, kept.minima, kept.meanings, tiles)
    computed = multiply(kept.ordered(jax.numpy.array(x)), *args, in_four=in_four)
    np.testing.assert_allclose(computed, x @ matrix.dequantize().T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["q4_k", *(swept(kind) for kind in SOME_KINDS if kind != "q4_k")])
def test_the_interpreted_kernel_gives_each_row_the_product_with_its_experts_matrix(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax.experimental import pallas
    from jax.sharding import NamedSharding, PartitionSpec

    from tidewheel.engine.devices.tpu.grouped import Grouped, place
    from tidewheel.engine.devices.tpu.mesh import make_mesh

    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(Grouped, "_has_kernel", True)
    monkeypatch.setattr(jax.lax, "ragged_dot", None)
    matrix = grouped(stored(kind, (512, 512), kind))
    matrices = [matrix.rows(slice(start, start + 128)) for start in range(0, 512, 128)]
    everywhere = NamedSharding(make_mesh(1), PartitionSpec(None, None, None))
    kept = place(matrices, "float32", everywhere, is_stack=True, is_table=False)
    # More than a block, none, a whole block, one; then rows of padding.
    sizes = np.array([20, 0, 16, 1])
    expert = np.repeat(np.arange(5), [*sizes, 3])
    x = np.random.default_rng(1).standard_normal((len(expert), 512), np.float32)
    computed = kept.multiply_stack(*map(jax.numpy.array, (x, expert, sizes)))
    for row, number in enumerate(expert[:-3]):
        expected = x[row] @ matrices[number].dequantize().T
        np.testing.assert_allclose(computed[row], expected, rtol=1e-3, atol=1e-3)


def test_xla_computes_what_fills_no_tiles() -> None:
    from tidewheel.engine.devices.tpu.grouped_kernel import tiles_of

    assert tiles_of(32, 256, 128, 512, 32, in_four=True) is not None
    assert tiles_of(32, 1440, 512, 2880, 32, in_four=True) == (32, 128, 1440, 32), "all rows, if no 128 divide them"
    assert tiles_of(32, 5504, 512, 11008, 32, in_four=True) == (32, 512, 128, 32)
    assert tiles_of(32, 4128, 512, 8256, 32, in_four=True) is None, "too many rows for one tile"
    assert tiles_of(32, 64, 128, 96, 32, in_four=True) is None, "half a run"
    assert tiles_of(32, 256, 96, 512, 32, in_four=True) is None, "outputs of less than a vector"
    assert tiles_of(8, 256, 128, 512, 32, in_four=True) is None, "less tokens than a tile has"


@pytest.mark.sweep
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("chips", ["v4", "v5e", "v5e-4", "v5p", "v6e"])
def test_libtpu_compiles_products_that_dequantize_no_matrix_in_memory(
    kind: str, chips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_packages("libtpu")
    from engine.devices.tpu.ahead_of_time import mesh_of
    from jax.sharding import NamedSharding, PartitionSpec

    from tidewheel.engine.devices.tpu.grouped import place
    from tidewheel.engine.devices.tpu.mesh import AXIS, replicated

    outputs, inputs = (14336, 4096) if kind != "mxfp4" else (5120, 2880)  # which no 128 rows of codes divide
    mesh, matrix = mesh_of(chips), grouped(stored(kind, (512, inputs), kind)).rows(np.arange(outputs) % 512)
    described = jax.ShapeDtypeStruct
    monkeypatch.setattr(jax, "device_put", lambda array, to: described(array.shape, array.dtype, sharding=to))
    by_output = NamedSharding(mesh, PartitionSpec(AXIS))
    kept = place([matrix], "bfloat16", by_output, is_stack=False, is_table=False)
    for num_tokens in (16, 512):
        x = described((num_tokens, inputs), np.float32, sharding=replicated(mesh))
        compiled = jax.jit(lambda kept, x: kept.multiply(x)).lower(kept, x).compile()
        # XLA's own way would take 2 bytes for a weight, and 4 for each of scale and minimum.
        assert compiled.memory_analysis().temp_size_in_bytes < outputs * inputs


@pytest.mark.sweep
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("chips", ["v4", "v5e", "v5e-4", "v5p", "v6e"])
def test_libtpu_compiles_experts_that_are_dequantized_nowhere_in_memory(
    kind: str, chips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_packages("libtpu")
    from engine.devices.tpu.ahead_of_time import mesh_of
    from jax.sharding import NamedSharding, PartitionSpec

    from tidewheel.engine.devices.tpu.grouped import place
    from tidewheel.engine.devices.tpu.mesh import AXIS, replicated

    count, outputs, inputs = 16, 2048, 2048
    mesh, matrix = mesh_of(chips), grouped(stored(kind, (512, inputs), kind)).rows(np.arange(outputs) % 512)
    described = jax.ShapeDtypeStruct
    monkeypatch.setattr(jax, "device_put", lambda array, to: described(array.shape, array.dtype, sharding=to))
    by_output = NamedSharding(mesh, PartitionSpec(None, None, AXIS))
    kept = place([matrix] * count, "bfloat16", by_output, is_stack=True, is_table=False)
    for num_rows in (64, 512):
        rows, every = (num_rows,), replicated(mesh)
        x = described((*rows, inputs), "float32", sharding=every)
        expert, sizes = (described(shape, "int32", sharding=every) for shape in (rows, (count,)))
        product = jax.shard_map(
            lambda kept, *rows: kept.multiply_stack(*rows),
            mesh=mesh,
            in_specs=(kept.partitions(), *[PartitionSpec()] * 3),
            out_specs=PartitionSpec(None, AXIS),
            check_vma=False,
        )
        compiled = jax.jit(product).lower(kept, x, expert, sizes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < count * outputs * inputs


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
