"""Accelerators keep the numbers of quantized files, in as much memory as their plan says."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engine.weights.stored_tensors import KINDS, StoredWeights, decoder, stored

from tidewheel.engine.cancellation import Cancellation
from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.base import Device
from tidewheel.engine.devices.graph.accelerators import cuda
from tidewheel.engine.devices.grouped_plan import read_grouped, why_not_grouped
from tidewheel.engine.devices.grouped_weights import GroupedMatrix, joined, num_bytes
from tidewheel.engine.devices.grouping import as_planned, grouped, nearest_e4m3
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights.quantization import ACCELERATOR_METHODS, Method, Quantization, TensorFormat, format_of
from tidewheel.engine.weights.quantized import method_to_load_with
from tidewheel.engine.weights.tensor import DenseTensor

SHAPE = (6, 512)
# Root of the mean square of a rounded weight's error, beside that of normally distributed weights.
ERRORS: dict[Method, float] = {
    "int8": 0.006,
    "int8-channel": 0.01,
    "int4": 0.09,
    "int4-fast": 0.1,
    "q4_k_m": 0.09,
    "q5_k_m": 0.045,
    "q6_k": 0.023,
    "q8_0": 0.006,
    "fp8": 0.03,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_files_and_so_is_the_plans_memory(kind: str) -> None:
    tensor = stored(kind, SHAPE, kind)
    matrix = grouped(tensor)
    expected = tensor.dequantize()
    if kind == "nvfp4":  # whose scales are divided, and here multiplied by the inverse
        np.testing.assert_allclose(matrix.dequantize(), expected, rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(matrix.dequantize(), expected)
    assert matrix.num_bytes == num_bytes(tensor.stored_format, SHAPE)


@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "gptq-3", "e4m3-block", "nvfp4", "int8"])
def test_parts_of_a_matrix_are_parts_of_its_numbers(kind: str) -> None:
    matrix = grouped(stored(kind, SHAPE, kind))
    whole = matrix.dequantize()
    rows = np.array([4, 4, 1])
    np.testing.assert_array_equal(matrix.rows(rows).dequantize(), whole[rows])
    np.testing.assert_array_equal(matrix.inputs(256, 512).dequantize(), whole[:, 256:])
    again = joined([matrix.rows(slice(0, 2)), matrix.rows(slice(2, 6))])
    np.testing.assert_array_equal(again.dequantize(), whole)


def test_inputs_that_fill_no_run_of_codes() -> None:
    for kind in ("q4_0", "gptq-3", "e4m3-channel"):
        tensor = stored(kind, (3, 96), kind)
        matrix = grouped(tensor)
        np.testing.assert_array_equal(matrix.dequantize(), tensor.dequantize())
        assert matrix.num_bytes == num_bytes(tensor.stored_format, (3, 96))


def _quantizations() -> list[Any]:
    needs_native = importlib.util.find_spec("tidewheel._native") is None
    made = {"int8-channel", "int4-fast", "fp8"}  # without the native library
    skip = pytest.mark.skip("needs the native extension")
    return [
        pytest.param(Quantization(method), error, marks=[skip] if needs_native and method not in made else [])
        for method, error in ERRORS.items()
    ] + [(Quantization("int4-fast", 128, zero_points=True), 0.11)]


@pytest.mark.parametrize(("quantization", "most"), _quantizations())
def test_weights_in_floats_are_rounded_to_the_nearest(quantization: Quantization, most: float) -> None:
    weights = np.random.default_rng(3).standard_normal(SHAPE, np.float32)
    weights[1] = 0
    name = "layers.0.down.weight" if quantization.method != "int8-channel" else "layers.0.up.weight"
    format = format_of(name, SHAPE, "float32", quantization, num_layers=8)
    matrix = as_planned(DenseTensor(weights, "float32"), format, Cancellation())
    assert isinstance(matrix, GroupedMatrix)
    assert matrix.num_bytes == num_bytes(format, SHAPE)
    rounded = matrix.dequantize()
    assert np.sqrt(np.square(rounded - weights).mean()) <= most
    assert not rounded[1].any()


def test_every_method_has_a_bound() -> None:
    assert {*ERRORS} == {*ACCELERATOR_METHODS}


def test_the_nearest_e4m3_is_that_of_ml_dtypes() -> None:
    values = np.random.default_rng(1).uniform(-460, 460, 4000).astype(np.float32)
    values[::2] *= np.float32(2) ** -np.arange(2000) % 20
    values[:4] = (0.0, -0.0, 448, -(2.0**-10))
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(nearest_e4m3(values), expected)


@pytest.mark.parametrize("device", ["cuda", "graph-cpu", "tpu"])
def test_the_plan_of_a_model_is_its_memory(device: str) -> None:
    spec = decoder(tied=False, num_layers=4)
    weights = StoredWeights(spec, *KINDS)
    plan = get_device(device).plan(spec, weights, "bfloat16", None)
    total = 0
    for name, tensor in read_grouped(weights, plan.formats, Cancellation()):
        assert isinstance(tensor, GroupedMatrix) == (len(tensor_shapes(spec)[name]) == 2)
        if isinstance(tensor, DenseTensor):
            total += 4 * tensor.data.size
        elif device != "tpu":
            total += tensor.num_bytes
        else:
            order = [] if tensor.input_order is None else [tensor.input_order]
            arrays = (tensor.codes, *tensor.floats(), *order)
            total += sum(array.nbytes for array in arrays if array is not None)
    assert plan.weight_bytes == total


def test_eight_billion_parameters_in_four_bits_need_no_16_gb() -> None:
    spec = decoder(tied=False)
    parameters = sum(np.prod(shape) for shape in tensor_shapes(spec).values())
    for kind, most in (("q4_k", 4.7), ("awq", 4.3), ("mxfp4", 4.6), ("nf4", 4.6)):
        weights = StoredWeights(spec, kind)
        weights.kinds["embed.weight"] = kind
        assert 8 * cuda(None).plan(spec, weights, "bfloat16", None).weight_bytes <= most * parameters


def test_what_accelerators_that_share_a_model_would_divide_within_a_group_is_dequantized(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = decoder()
    weights = StoredWeights(spec, "gptq-4", "q6_k")
    shared: Device = cuda(None, None, ParallelOptions(tensor_parallel_size=2))
    formats = shared.plan(spec, weights, "bfloat16", None).formats
    dequantized = {name for name, format in formats.items() if not format.is_stored}
    assert dequantized == {
        name
        for name, kind in weights.kinds.items()
        if (name.endswith(".o.weight") or (name.endswith(".down.weight") and kind == "gptq-4"))
    }
    with caplog.at_level(logging.INFO):
        tensors = dict(read_grouped(weights, formats, Cancellation()))
    assert all(isinstance(tensors[name], DenseTensor) for name in dequantized)
    assert f"{len(dequantized)} quantized matrices are dequantized as they are read" in caplog.text


def test_odd_groups_routers_and_tables_out_of_order_stay_in_floats() -> None:
    plain = stored("q8_0", SHAPE, "plain").stored_format
    assert why_not_grouped("layers.0.q.weight", SHAPE, plain) is None
    assert why_not_grouped("layers.0.router.weight", SHAPE, plain) == "routers are kept in float32"
    assert why_not_grouped("layers.0.latent_k_up.weight", SHAPE, plain) == "they are taken apart"
    assert "not of 48" in str(why_not_grouped("layers.0.q.weight", SHAPE, TensorFormat("e4m3", 48)))
    assert why_not_grouped("layers.0.q.weight", SHAPE, TensorFormat("e4m3", 512)) is None, "whole rows"
    ordered = stored("gptq-4", SHAPE, "ordered").stored_format
    assert why_not_grouped("layers.0.q.weight", SHAPE, ordered) is None
    assert "order of their own" in str(why_not_grouped("embed.weight", SHAPE, ordered))


def test_fp8_names_the_method_of_a_checkpoint_or_quantizes_one_in_floats() -> None:
    assert method_to_load_with("fp8", {}, None) == "fp8"
    assert method_to_load_with("fp8", {"quantization_config": {"quant_method": "fp8"}}, None) is None
    with pytest.raises(ModelError, match="names the method of a checkpoint, but this one's is 'gptq'"):
        method_to_load_with("fp8", {"quantization_config": {"quant_method": "gptq"}}, None)
