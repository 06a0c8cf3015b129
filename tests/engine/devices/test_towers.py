"""Towers: what the torch reference computes, in pieces of any size and in any company."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine.devices.made_models import MLP, PLAIN, RandomWeights, decoder, decoder_of, load
from harness import Harness, device_ids, make_device, over_devices
from numpy.typing import NDArray
from samples import swept

from tidewheel.engine.cancellation import Cancellation, LoadCancelledError
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.tower import Rows, TowerExecutor, TowerOptions
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.models.spec import (
    AttentionSpec,
    CrossAttentionSpec,
    DisentangledSpec,
    ExpertsSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    ParallelSpec,
    ProjectionSpec,
    ResidualBlockSpec,
    RopeSpec,
    RouterSpec,
    ShortConvSpec,
    TemperatureSpec,
    TowerSpec,
    tower_shapes,
)
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate
from tidewheel.engine.weights.quantization import Quantization, TensorFormat
from tidewheel.engine.weights.quantizing import quantize
from tidewheel.engine.weights.tensor import DenseTensor, WeightTensor

torch = pytest.importorskip("torch")
pytest.importorskip("tidewheel._native")
from tidewheel.engine.devices.cpu.device import CpuDevice  # noqa: E402

CPU_IDS = [device_id for device_id in device_ids() if device_id != "torch"]
HIDDEN = 80
LAYER_NORM = NormSpec("layer", 1e-6, bias=True)
RMS = NormSpec("rms", 1e-6)
GELU = MlpSpec(152, "gelu_tanh", gated=False, bias=True)
SIGLIP = AttentionSpec(2, 2, 72, 72**-0.5, qkv_bias=True, out_bias=True, two_way=True)
TWO_AXES = RopeSpec(tuple(100.0 ** (-i / 20) for i in range(20)) * 2, axes=(0,) * 20 + (1,) * 20)
QWEN = AttentionSpec(2, 2, 80, 80**-0.5, qkv_bias=True, out_bias=True, rope=TWO_AXES, two_way=True)
ONE_AXIS = RopeSpec(tuple(100.0 ** (-i / 32) for i in range(32)))
PIXTRAL = RopeSpec(tuple(50.0 ** (-i / 32) for i in range(32)), axes=(0, 1) * 16, interleaved=True)


WINDOWED = AttentionSpec(4, 1, 64, 0.125, rope=ONE_AXIS, sliding_window=130, query_temperature=TemperatureSpec(0.1, 8))
BESIDE = ResidualBlockSpec(
    ParallelSpec((ResidualBlockSpec(replace(QWEN, two_way=False)), ResidualBlockSpec(GELU, RMS))), RMS
)
WINDOWED_BESIDE = ResidualBlockSpec(
    ParallelSpec((ResidualBlockSpec(replace(QWEN, sliding_window=9)), ResidualBlockSpec(GELU, RMS))), RMS
)


def tower(attention: AttentionSpec, mlp: MlpSpec | ExpertsSpec, norm: NormSpec | None, **fields: Any) -> TowerSpec:
    """Two layers, what comes before and behind them, and two tables."""
    layer = (ResidualBlockSpec(attention, norm, **fields), ResidualBlockSpec(mlp, norm, **fields))
    return TowerSpec(
        HIDDEN,
        (layer, layer),
        (
            ("patches", ProjectionSpec(75, HIDDEN)),
            ("merger.up", ProjectionSpec(4 * HIDDEN, 150, bias=True, norm=LAYER_NORM, activation="gelu")),
            ("merger.down", ProjectionSpec(150, 64, bias=True, norm=RMS)),
        ),
        (("positions", (6, 5, HIDDEN)), ("class", (HIDDEN,))),
        (("resampler", CrossAttentionSpec(3, 40, 0.2)),),
    )


SPECS = {
    "layer norm, MLP with biases": tower(SIGLIP, GELU, LAYER_NORM),
    "quick GELU, heads of 64": tower(replace(SIGLIP, head_dim=64), replace(GELU, activation="gelu_quick"), LAYER_NORM),
    "rope by rows and columns, gated MLP": tower(QWEN, replace(MLP, bias=True), RMS),
    "interleaved rope, grouped heads": tower(
        AttentionSpec(4, 2, 64, 0.125, rope=PIXTRAL, two_way=True), replace(MLP, activation="gelu_tanh"), RMS
    ),
    "rope of one axis": tower(replace(QWEN, rope=replace(TWO_AXES, axes=())), GELU, RMS),
    "norms of queries, keys and values, post-norms": tower(
        replace(QWEN, qk_norm=RMS, v_norm=NormSpec("rms", 1e-6, weight=False), scale=1.0), MLP, RMS, post_norm=RMS
    ),
    "clipped matrices": tower(
        AttentionSpec(4, 2, 40, 40**-0.5, clipped=True, two_way=True), replace(MLP, clipped=True), RMS, post_norm=RMS
    ),
    "clipped matrices, GELU": tower(
        replace(QWEN, qkv_bias=False, out_bias=False, clipped=True),
        replace(MLP, activation="gelu_tanh", clipped=True),
        RMS,
        post_norm=RMS,
    ),
    "norms over all heads": tower(replace(QWEN, qk_norm=LAYER_NORM, qk_norm_over="whole"), GELU, LAYER_NORM),
    "norms after rope, capped scores": tower(
        replace(QWEN, qk_norm=RMS, qk_norm_after_rope=True, softcap=3.0), GELU, RMS
    ),
    "windows, norms of sums": tower(
        replace(QWEN, sliding_window=9), replace(MLP, down_bias=True), None, sum_norm=LAYER_NORM
    ),
    "windows beside MLPs": replace(tower(QWEN, GELU, RMS), layers=((WINDOWED_BESIDE,),) * 2),
    "ALiBi": tower(replace(SIGLIP, alibi_slopes=(0.5, 0.03)), GELU, LAYER_NORM),
    "biases by distance": tower(replace(SIGLIP, bias_span=30), GELU, LAYER_NORM),
    "ALiBi and biases in windows": tower(
        replace(SIGLIP, alibi_slopes=(0.5, 0.03), bias_span=3, sliding_window=130), GELU, LAYER_NORM
    ),
    "content and positions": tower(
        replace(SIGLIP, disentangled=DisentangledSpec(40, tuple(min(i, 39) for i in range(61)))), GELU, LAYER_NORM
    ),
    "content to positions": tower(
        replace(SIGLIP, disentangled=DisentangledSpec(3, (2, 0, 1), position_to_content=False)), GELU, LAYER_NORM
    ),
    "positions to content": tower(
        replace(SIGLIP, disentangled=DisentangledSpec(3, (0, 1, 1), content_to_position=False)), GELU, LAYER_NORM
    ),
    "experts with a bias of their sum": tower(
        SIGLIP,
        ExpertsSpec(5, 2, 48, "gelu", router=RouterSpec(normalize=False), gated=False, sum_bias=True),
        None,
        sum_norm=LAYER_NORM,
    ),
    "causal, norms of heads": tower(AttentionSpec(4, 2, 64, 0.125, rope=ONE_AXIS, qk_norm=RMS), MLP, RMS),
    "causal in windows": replace(
        tower(WINDOWED, MLP, RMS), layers=((ResidualBlockSpec(WINDOWED, RMS), ResidualBlockSpec(MLP, RMS)), (BESIDE,))
    ),
}
OF_LEVELS = {
    "layer norm, MLP with biases",
    "rope by rows and columns, gated MLP",
    "ALiBi and biases in windows",
    "content and positions",
    "causal in windows",
}
WINDOWS = [64, 64, 1, 17, 64, 3, 48, 16, 33]
LONG = [700]  # longer than a KV split
STEPS = [WINDOWS, LONG, [5], [2] * 80]


class TowerWeights(RandomWeights):
    """Random weights, and bounds that some values exceed."""

    def __init__(self, spec: TowerSpec) -> None:
        self._shapes = tower_shapes(spec)

    def __getitem__(self, name: str) -> DenseTensor:
        if name.endswith(".bounds"):
            size = 0.5 + np.random.default_rng(len(name)).random(4, np.float32)
            return DenseTensor(size * np.array([-1, 1, -1, 1], np.float32), "float32")
        tensor = super().__getitem__(name)
        if name.endswith("distance_bias"):  # which repeats the bias of the largest distance on both sides
            rows = tensor.data.reshape(2, -1)
            rows[:, :16], rows[:, -16:] = rows[:, 16:17], rows[:, -17:-16]
        return tensor


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def loaded(
    device_id: str,
    spec: TowerSpec,
    dtype: DType = "float32",
    quantization: Quantization | None = None,
    threads_bind: str | None = None,
    max_rows: int = 1024,
) -> Iterator[tuple[TowerExecutor, Executor]]:
    """A tower, and the executor beside it."""
    beside = load(device_id, decoder(PLAIN), threads_bind=threads_bind)
    options = TowerOptions(dtype, max_rows, quantization)
    try:
        yield make_device(device_id).load_tower(spec, TowerWeights(spec), options, beside), beside
    finally:
        beside.close()


def finished(work: Generator[None, None, Rows]) -> tuple[Rows, int]:
    """What it returns, and in how many pieces."""
    for pieces in itertools.count():
        try:
            next(work)
        except StopIteration as end:
            return end.value, pieces
    raise AssertionError


def result(work: Generator[None, None, Rows]) -> Rows:
    return finished(work)[0]


def made_rows(count: int, width: int = HIDDEN) -> Rows:
    return np.random.default_rng(count).standard_normal((count, width), np.float32)


def starts(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def places(count: int) -> NDArray[np.int32]:
    """The rows and columns of patches that are 13 to a row."""
    return np.stack([np.arange(count) // 13, np.arange(count) % 13]).astype(np.int32)


def layers(tower: TowerExecutor, lengths: Sequence[int]) -> Rows:
    x = made_rows(sum(lengths))
    for index in range(len(tower.spec.layers)):
        x = result(tower.layer(index, x, starts(lengths), places(len(x))))
    return x


def assert_near(ours: Rows, expected: Rows) -> None:
    np.testing.assert_allclose(ours, expected, atol=1e-4 * float(np.abs(expected).max()), rtol=0)


@functools.cache
def reference(name: str) -> tuple[list[Rows], list[Rows]]:
    """What the torch reference computes: all layers, of many segments and of a long one, and the projections."""
    with loaded("torch", SPECS[name]) as (tower, _):
        projected = [result(tower.project(each, made_rows(70, spec.inputs))) for each, spec in tower.spec.projections]
        return [layers(tower, lengths) for lengths in (WINDOWS, LONG)], projected


@pytest.mark.parametrize(("device_id", "name"), over_devices(SPECS, levels=OF_LEVELS))
def test_layers_compute_what_the_reference_computes(device_id: str, name: str) -> None:
    with loaded(device_id, SPECS[name]) as (ours, _):
        for lengths, expected in zip((WINDOWS, LONG), reference(name)[0], strict=True):
            assert_near(layers(ours, lengths), expected)


@pytest.mark.parametrize(("device_id", "name"), over_devices(SPECS, levels=OF_LEVELS))
def test_projections_compute_what_the_reference_computes(device_id: str, name: str) -> None:
    with loaded(device_id, SPECS[name]) as (ours, _):
        for (projection, spec), expected in zip(ours.spec.projections, reference(name)[1], strict=True):
            assert_near(result(ours.project(projection, made_rows(70, spec.inputs))), expected)
            assert expected.shape == (70, spec.outputs)


# Queries and keys; of the latter fewer than queries, too, and more than a KV split.
ATTENDING = [(37, 300), (40, 2), (1, 700), (150, 150)]


def attended(tower: TowerExecutor, queries: int, keys: int) -> Rows:
    rows = (made_rows(queries, 120), made_rows(keys + 1000, 120)[:keys], made_rows(keys, 120))
    return result(tower.attend("resampler", *rows))


@pytest.mark.parametrize("device_id", CPU_IDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_see_other_rows_as_in_the_reference(device_id: str, dtype: DType) -> None:
    spec = SPECS["layer norm, MLP with biases"]
    with loaded("torch", spec, dtype) as (reference, _), loaded(device_id, spec, dtype) as (ours, _):
        for queries, keys in ATTENDING:
            found, expected = attended(ours, queries, keys), attended(reference, queries, keys)
            assert found.shape == (queries, 120)
            far = 1e-4 if dtype == "float32" else 0.02
            np.testing.assert_allclose(found, expected, atol=far * float(np.abs(expected).max()), rtol=0)


def test_each_query_sees_all_keys_head_by_head() -> None:
    with loaded("torch", SPECS["layer norm, MLP with biases"]) as (reference, _):
        q, k, v = made_rows(4, 120), made_rows(9, 120), made_rows(9, 120)
        found = result(reference.attend("resampler", q, k, v))
        for head in range(3):
            part = slice(40 * head, 40 * head + 40)
            weights = np.exp(0.2 * q[:, part] @ k[:, part].T)
            expected = weights / weights.sum(-1, keepdims=True) @ v[:, part]
            np.testing.assert_allclose(found[:, part], expected, atol=1e-5)


@pytest.mark.parametrize("device_id", CPU_IDS)
def test_neither_pieces_nor_other_queries_change_what_a_query_sees(
    device_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found, pieces = SPECS["layer norm, MLP with biases"], [], []
    q, k, v = made_rows(70, 120), made_rows(600, 120), made_rows(601, 120)[:600]
    for rows in (1024, 33, 7):
        with monkeypatch.context() as patched:
            small_pieces(patched, rows)
            with loaded(device_id, spec) as (ours, _):
                layers(ours, [50])  # whose keys lie where these will
                together, count = finished(ours.attend("resampler", q, k, v))
                alone = result(ours.attend("resampler", q[41:42], k, v))
                found.append(np.append(together, alone))
                pieces.append(count)
                np.testing.assert_array_equal(alone[0], together[41])
    assert pieces[0] == 2 < pieces[1] < pieces[2]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("device_id", ["torch", *CPU_IDS[:1]])
def test_attention_that_does_not_fit_is_refused(device_id: str) -> None:
    with loaded(device_id, SPECS["layer norm, MLP with biases"], max_rows=64) as (tower, _):
        for name, sizes, says in (
            ("other", [(2, 120)] * 3, "no cross attention other"),
            ("resampler", [(2, 120), (2, 119), (2, 120)], r"\[N, 120\]"),
            ("resampler", [(2, 120), (0, 120), (0, 120)], "1 to 64 keys"),
            ("resampler", [(2, 120), (65, 120), (65, 120)], "1 to 64 keys"),
            ("resampler", [(2, 120), (5, 120), (4, 120)], "not 5 and 4"),
        ):
            with pytest.raises(ValueError, match=says):
                result(tower.attend(name, *(np.zeros(size, np.float32) for size in sizes)))


@pytest.mark.parametrize("name", [name for name in SPECS if "windows" not in name and "causal" not in name])
def test_every_row_sees_all_of_its_segment_and_nothing_else(name: str) -> None:
    with loaded("torch", SPECS[name]) as (reference, _):
        rows, changed = made_rows(10), made_rows(10)
        changed[6] += 1
        before, after = (result(reference.layer(0, x, starts([4, 5, 1]), places(10))) for x in (rows, changed))
        assert (before != after).any(axis=1).tolist() == [False] * 4 + [True] * 5 + [False]


def test_in_a_window_a_row_sees_as_far_ahead_as_back() -> None:
    with loaded("torch", SPECS["windows, norms of sums"]) as (reference, _):
        rows, changed = made_rows(60), made_rows(60)
        changed[30] += 1
        before, after = (result(reference.layer(0, x, starts([50, 10]), places(60))) for x in (rows, changed))
        assert np.flatnonzero((before != after).any(axis=1)).tolist() == [*range(22, 39)]


def test_where_attention_is_causal_a_row_sees_itself_and_those_before_it() -> None:
    for name, last in (("causal, norms of heads", 200), ("causal in windows", 160)):
        with loaded("torch", SPECS[name]) as (reference, _):
            rows, changed = made_rows(210), made_rows(210)
            changed[30] += 1
            before, after = (result(reference.layer(0, x, starts([200, 10]), places(210))) for x in (rows, changed))
            assert np.flatnonzero((before != after).any(axis=1)).tolist() == [*range(30, last)]


@pytest.mark.parametrize(
    "name", ["windows, norms of sums", "windows beside MLPs", "biases by distance", "rope of one axis"]
)
@pytest.mark.parametrize("device_id", CPU_IDS[:1])
def test_rows_behind_those_that_are_seen_see_them_alone(
    device_id: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, seen = [64, 20, 1, 7], [60, 12, 1, 2]
    long, most = [700], [694]
    with loaded("torch", SPECS[name]) as (reference, _), loaded(device_id, SPECS[name]) as (ours, _):
        for parts, first in ((lengths, seen), (long, most)):
            x, where, of = made_rows(sum(parts)), places(sum(parts)), np.array(first, np.int32)
            wanted = result(reference.layers(x, starts(parts), where, seen=of))
            found = result(ours.layers(x, starts(parts), where, seen=of))
            assert_near(found, wanted)
            kept = np.concatenate([np.arange(count) < until for count, until in zip(parts, first, strict=True)])
            alone = result(ours.layers(x[kept], starts(first), np.ascontiguousarray(where[:, kept])))
            np.testing.assert_array_equal(found[kept], alone)
            with monkeypatch.context() as patched:
                small_pieces(patched, 40)
                np.testing.assert_array_equal(result(ours.layers(x, starts(parts), where, seen=of)), found)
        for wrong, said in (([5], "a row or more"), ([0, 3], "a row or more"), ([2, 6], "a row or more")):
            with pytest.raises(ValueError, match=said):
                result(ours.layer(0, made_rows(10), starts([5, 5]), places(10), seen=np.array(wrong, np.int32)))
        if "windows" in name:
            assert_refuses_unseen(ours, 10, seen=1, ahead=8)


def assert_refuses_unseen(tower: TowerExecutor, rows: int, seen: int, ahead: int) -> None:
    with pytest.raises(ValueError, match=f"than a row sees ahead, {ahead}"):
        result(tower.layer(0, made_rows(rows), starts([rows]), places(rows), seen=np.array([seen], np.int32)))


def test_where_attention_is_causal_all_rows_are_seen() -> None:
    for name in ("causal, norms of heads", "causal in windows"):
        with loaded(CPU_IDS[0], SPECS[name]) as (ours, _):
            assert_refuses_unseen(ours, 10, seen=9, ahead=0)
            native: Any = ours
            native, of = native.native, np.array([9], np.int32)
            with pytest.raises(ValueError, match="than a row sees ahead"):
                native.run(0, 1, made_rows(10), starts([10]), np.array([10], np.int32), places(10), of, None)


def small_pieces(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Make every piece have `rows`, as if more took too long."""
    pace = importlib.import_module("tidewheel.engine.devices.cpu.pace")
    monkeypatch.setattr(pace, "_LEAST_ROWS", rows)
    monkeypatch.setattr(TowerExecutor, "piece_s", 0.0)


@pytest.mark.parametrize("device_id", CPU_IDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [WINDOWS, LONG], ids=["windows", "one long segment"])
def test_pieces_change_nothing(
    device_id: str, dtype: DType, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS["causal in windows" if lengths is LONG else "rope by rows and columns, gated MLP"]
    found, pieces = [], []
    for rows in (1024, 96, 33, 1):
        with monkeypatch.context() as patched:
            small_pieces(patched, rows)
            with loaded(device_id, spec, dtype) as (ours, _):
                x = layers(ours, lengths)
                up, count = finished(ours.project("merger.up", made_rows(70, 4 * HIDDEN)))
                pieces.append(count + finished(ours.layer(0, x, starts(lengths), places(len(x))))[1])
                found.append(np.append(x.ravel(), up.ravel()))
    assert pieces[0] == 2 < pieces[1] < pieces[2] < pieces[3]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


class Adapted(TowerWeights):
    """The weights with the updates of an adapter."""

    def __init__(self, spec: TowerSpec, adapter: LoraAdapter) -> None:
        super().__init__(spec)
        self._updates = {f"{update.name}.weight": update for update in adapter.updates}

    def __getitem__(self, name: str) -> DenseTensor:
        tensor, update = super().__getitem__(name), self._updates.get(name)
        return tensor if update is None else replace(tensor, data=tensor.data + update.scale * (update.b @ update.a))


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
def test_adapters_and_positions_in_any_pieces(device_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, random = SPECS["content and positions"], np.random.default_rng(1)
    adapter = LoraAdapter(
        tuple(
            LowRankUpdate(name, *(random.standard_normal(shape, np.float32) for shape in ((3, k), (n, 3))), scale=0.2)
            for name, n, k in (("layers.0.q", 144, HIDDEN), ("layers.0.k", 144, HIDDEN), ("layers.1.down", HIDDEN, 152))
        )
    )
    lengths, adapters = [40, 130, 7], np.array([0, -1, 0], np.int32)
    x, bounds = made_rows(sum(lengths)), starts(lengths)
    expected = []
    for weights in (TowerWeights(spec), Adapted(spec, adapter)):
        reference = make_device("torch").load_tower(spec, weights, TowerOptions("float32", 1024))
        expected.append(result(reference.layers(x, bounds)))
    wanted = np.concatenate([expected[a + 1][i:j] for a, i, j in zip(adapters, bounds, bounds[1:], strict=False)])
    found = []
    for rows in (1024, 33, 1):
        with monkeypatch.context() as patched:
            small_pieces(patched, rows)
            options = TowerOptions("float32", 1024, adapters=[adapter])
            ours = make_device(device_id).load_tower(spec, TowerWeights(spec), options)
            found.append(result(ours.layers(x, bounds, adapters=adapters)))
            assert_near(result(ours.layers(x, bounds)), expected[0])
            with pytest.raises(ValueError, match="there is no adapter 1"):
                result(ours.layers(x, bounds, adapters=np.array([0, 1, 0], np.int32)))
            with pytest.raises(ValueError, match=r"adapters must have the shape \[3\], not \[2\]"):
                result(ours.layers(x, bounds, adapters=adapters[:2]))
            # Few rows, which go through all layers at once where pieces are large.
            few, wide = starts([9, 9]), np.array([0, -1], np.int64)
            short = [
                result(ours.layers(x[:18], few, adapters=cast(Any, chosen))) for chosen in (wide, wide.astype(np.int32))
            ]
            np.testing.assert_array_equal(*short)
            ours.close()
        np.testing.assert_array_equal(found[-1], found[0])
    assert_near(found[0], wanted)


@pytest.mark.parametrize("name", ["patches", "layers.0.pos_k", "layers.1.pos_q"])
def test_only_what_the_rows_of_layers_go_through_has_adapters(name: str) -> None:
    spec, zeros = SPECS["content and positions"], np.zeros((1, 1), np.float32)
    adapter = LoraAdapter((LowRankUpdate(name, zeros, zeros, 1.0),))
    with pytest.raises(DeviceError, match=f"no adapters of {name}"):
        make_device(CPU_IDS[0]).load_tower(spec, TowerWeights(spec), TowerOptions("float32", 1024, adapters=[adapter]))


def test_the_reference_has_no_adapters() -> None:
    with loaded("torch", SPECS["content and positions"]) as (reference, _):
        x, none = made_rows(6), np.array([-1, -1], np.int32)
        np.testing.assert_array_equal(
            result(reference.layers(x, starts([2, 4]), adapters=none)), result(reference.layers(x, starts([2, 4])))
        )
        with pytest.raises(ValueError, match="there is no adapter 0"):
            result(reference.layers(x, starts([2, 4]), adapters=np.array([-1, 0], np.int32)))


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
@pytest.mark.parametrize("lengths", [WINDOWS, LONG], ids=["windows", "one long segment"])
def test_threads_change_nothing(device_id: str, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two processors")
    spec, found = SPECS["interleaved rope, grouped heads"], []
    for threads in (f"{cores[0]}", f"{cores[0]}-{cores[1]}", f"{cores[0]}|{cores[1]}"):
        for rows in (1024, 40):
            with monkeypatch.context() as patched:
                small_pieces(patched, rows)
                with loaded(device_id, spec, threads_bind=threads) as (ours, _):
                    found.append(layers(ours, lengths))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("device_id", [*CPU_IDS[:1], swept("torch")])
def test_a_tower_may_be_alone_and_run_all_layers_at_once(device_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("windows, norms of sums", "ALiBi and biases in windows", "causal in windows"):
        spec = SPECS[name]
        mixed = replace(spec, layers=(spec.layers[0], SPECS["layer norm, MLP with biases"].layers[0], spec.layers[1]))
        device, weights = make_device(device_id), TowerWeights(mixed)
        with loaded(device_id, mixed) as (beside, _):
            expected = [layers(beside, lengths) for lengths in STEPS]
            for threads in (1, 2):
                alone = device.load_tower(mixed, weights, TowerOptions("float32", 1024, threads=threads))
                for lengths, rows in zip(STEPS, expected, strict=True):
                    for _ in range(2):  # a piece of the second may have more rows
                        found = alone.layers(made_rows(len(rows)), starts(lengths), places(len(rows)))
                        np.testing.assert_array_equal(result(found), rows)
                alone.close()


@pytest.mark.parametrize("device_id", device_ids())
def test_a_segment_depends_on_itself_alone(device_id: str) -> None:
    spec = SPECS["rope by rows and columns, gated MLP"]
    with loaded(device_id, spec) as (ours, _):
        rows, where = made_rows(300), places(300)
        together = result(ours.layer(0, rows, starts([100, 41, 7, 152]), where))
        for begin, end in ((0, 100), (100, 141), (141, 148), (148, 300)):
            alone = result(ours.layer(0, rows[begin:end], starts([end - begin]), where[:, begin:end]))
            np.testing.assert_array_equal(alone, together[begin:end])


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
def test_the_model_may_run_between_pieces(device_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch, 100)
    with loaded(device_id, SPECS["layer norm, MLP with biases"]) as (ours, beside):
        rows, tokens = layers(ours, LONG), [3, 1, 4, 1, 5]
        logits = Harness(beside).logits(tokens)
        x, pieces = made_rows(700), 0
        for index in range(2):
            work = ours.layer(index, x, starts(LONG))
            while True:
                try:
                    next(work)
                except StopIteration as end:
                    x = end.value
                    break
                pieces += 1
                np.testing.assert_array_equal(Harness(beside).logits(tokens), logits)
                beside.release_scratch()
        np.testing.assert_array_equal(x, rows)
        assert pieces > 16


@pytest.mark.parametrize("device_id", device_ids())
def test_what_does_not_fit_is_refused(device_id: str) -> None:
    with loaded(device_id, SPECS["rope by rows and columns, gated MLP"], max_rows=8) as (ours, _):
        rows, where = made_rows(10), places(10)
        for name, width in (("patches", HIDDEN), ("merger.up", HIDDEN), ("none", 75)):
            with pytest.raises(ValueError, match=r"rows must have the shape|no projection"):
                result(ours.project(name, made_rows(3, width)))
        with pytest.raises(ValueError, match="shape"):
            result(ours.project("patches", made_rows(1, 75)[0]))
        with pytest.raises(ValueError, match="no layer 2"):
            result(ours.layer(2, rows, starts([5, 5]), where))
        with pytest.raises(ValueError, match="rows must have the shape"):
            result(ours.layer(0, rows[:, :-1], starts([5, 5]), where))
        for segments in (
            starts([5, 4]),
            starts([5, 6]),
            starts([5, 5])[1:],
            starts([5, 0, 5]),
            starts([8, -2, 4]),
            [[0]],
        ):
            with pytest.raises(ValueError, match="segment"):
                result(ours.layer(0, rows, np.array(segments, np.int32), where))
        with pytest.raises(ValueError, match="there is room for 8"):
            result(ours.layer(0, rows, starts([9, 1]), where))
        for positions in (None, where[:1], where[:, 1:], where[0]):
            with pytest.raises(ValueError, match="positions must have the shape"):
                result(ours.layer(0, rows, starts([5, 5]), positions))
        with pytest.raises(ValueError, match="no table"):
            ours.table("none")
        assert len(result(ours.layer(0, rows[:0], starts([]), where[:, :0]))) == 0
        assert result(ours.project("patches", made_rows(0, 75))).shape == (0, HIDDEN)


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
def test_the_runtime_itself_refuses_pieces_that_do_not_fit(device_id: str) -> None:
    with loaded(device_id, SPECS["rope by rows and columns, gated MLP"], max_rows=20) as (ours, _):
        native, where = ours.native, places(10)  # type: ignore[attr-defined]
        for count, begins, lengths, first, remembered in (
            (10, [0, 9], [9], 0, False),  # rows of no segment
            (10, [0, 10], [11], 0, False),  # a part of a segment, without the rest
            (10, [0, 10], [10], 1, True),  # more than the segment has
            (10, [0, 10], [21], 0, True),  # a segment without room
            (10, [0, 10], [15], -1, True),
            (10, [0, 5, 10], [5, 5], 0, True),  # only one segment is in several pieces
            (10, [0, 6, 5, 10], [6, 5, 5], 0, False),
            (10, [0, 4, 10], [10], 0, False),
            (3, [0, 1, 2, 3], [1, 1, 1], 0, False),  # in three blocks
            (33, [0, 33], [20], 0, True),  # more than a piece
        ):
            piece, there = (made_rows(count), np.array(begins, np.int32), np.array(lengths, np.int32)), places(count)
            with pytest.raises(ValueError, match=r"segment|piece|layer"):
                native.finish(0, *piece, first, there) if remembered else native.run(0, 1, *piece, there)
        for layer, end in ((0, 3), (1, 1), (-1, 1)):
            with pytest.raises(ValueError, match="no such layer"):
                native.run(layer, end, made_rows(10), starts([10]), np.array([10], np.int32), where)
        with pytest.raises(ValueError, match="no such layer"):
            native.remember(2, made_rows(10), starts([10]), np.array([10], np.int32), 0, where)
        for positions in (where[:, :5], where[:1]):
            with pytest.raises(ValueError, match="positions"):
                native.run(0, 1, made_rows(10), starts([10]), np.array([10], np.int32), positions)
        with pytest.raises(ValueError, match="projection"):
            native.project("patches", made_rows(2, 75), np.empty((3, HIDDEN), np.float32))


@pytest.mark.parametrize("device_id", device_ids()[:2])
def test_tables_are_given_as_they_are(device_id: str) -> None:
    spec = SPECS["layer norm, MLP with biases"]
    with loaded(device_id, spec, "bfloat16") as (ours, _):
        for name, shape in spec.tables:
            np.testing.assert_array_equal(ours.table(name), TowerWeights(spec)[name].data)
            assert ours.table(name).shape == shape


@pytest.mark.parametrize("device_id", device_ids()[:2])
def test_a_tower_is_closed_with_the_model(device_id: str) -> None:
    with loaded(device_id, SPECS["layer norm, MLP with biases"]) as (ours, _):
        pass
    with pytest.raises(DeviceError, match="closed"):
        next(ours.project("patches", made_rows(1, 75)))
    with pytest.raises(DeviceError, match="closed"):
        next(ours.layer(0, made_rows(1), starts([1])))
    ours.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
def test_memory_is_given_back(device_id: str) -> None:
    large = ProjectionSpec(2048, 8192)  # 64 MiB
    layer = SPECS["layer norm, MLP with biases"].layers[0]
    spec = TowerSpec(HIDDEN, (layer,), (("large", large),))
    with loaded(device_id, spec, max_rows=40000) as (ours, beside):
        gc.collect()
        before = resident_bytes()
        result(ours.layer(0, made_rows(3000), starts([3000])))
        beside.release_scratch()
        gc.collect()
        assert resident_bytes() < before + 2**21
        ours.close()
        del ours
        gc.collect()
        assert resident_bytes() < before - 48 * 2**20


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
@pytest.mark.parametrize(
    ("dtype", "quantization", "error"),
    [
        ("bfloat16", None, 0.03),
        ("float16", None, 0.01),
        ("bfloat16", Quantization("int8"), 0.05),
        ("float32", Quantization("int8-channel"), 0.05),
        ("bfloat16", Quantization("q8_0"), 0.05),
    ],
    ids=str,
)
def test_formats_are_near_floats(device_id: str, dtype: DType, quantization: Quantization | None, error: float) -> None:
    spec = SPECS["rope by rows and columns, gated MLP"]
    with loaded(device_id, spec) as (floats, _), loaded(device_id, spec, dtype, quantization) as (ours, _):
        expected, found = layers(floats, WINDOWS), layers(ours, WINDOWS)
        assert 0 < np.linalg.norm(found - expected) < error * np.linalg.norm(expected)
        assert ours.native.weight_bytes < floats.native.weight_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("device_id", CPU_IDS[:1])
def test_what_a_file_has_in_blocks_stays_in_them(device_id: str) -> None:
    class InBlocks(TowerWeights):
        def stored_format(self, name: str) -> TensorFormat | None:
            return None if isinstance(self[name], DenseTensor) else TensorFormat("q8_0")

        def __getitem__(self, name: str) -> WeightTensor:  # type: ignore[override]
            tensor = super().__getitem__(name)
            is_matrix = name.endswith(".weight") and tensor.data.ndim == 2 and tensor.data.shape[1] % 32 == 0
            return quantize(tensor, "q8_0", threads=1) if is_matrix else tensor

    spec = SPECS["rope by rows and columns, gated MLP"]
    loads, sizes = [], []
    for own_device, weights in (
        (device_id, InBlocks(spec)),
        (device_id, TowerWeights(spec)),
        ("torch", InBlocks(spec)),
    ):
        device, beside = make_device(own_device), load(own_device, decoder(PLAIN))
        options = TowerOptions("float32", 1024)
        ours = device.load_tower(spec, weights, options, beside)
        sizes.append(device.tower_bytes(spec, weights, options))
        loads.append(layers(ours, WINDOWS))
        beside.close()
    blocks, _, expected = loads
    assert 0 < np.linalg.norm(blocks - expected) < 0.03 * np.linalg.norm(expected)
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("device_id", device_ids()[:2])
def test_what_is_not_finite_is_refused(device_id: str) -> None:
    class Infinite(TowerWeights):
        def __getitem__(self, name: str) -> DenseTensor:
            tensor = super().__getitem__(name)
            if name == "positions":
                tensor.data[0, 0, 0] = np.inf
                return replace(tensor, origin="the positions")
            return tensor

    spec, beside = SPECS["layer norm, MLP with biases"], load(device_id, decoder(PLAIN))
    with pytest.raises(ModelError, match="the positions has 1 value that is not finite"):
        make_device(device_id).load_tower(spec, Infinite(spec), TowerOptions("float32", 8), beside)
    beside.close()


@pytest.mark.parametrize("device_id", device_ids()[:2])
def test_a_load_can_be_cancelled(device_id: str) -> None:
    spec, beside, cancellation = SPECS["layer norm, MLP with biases"], load(device_id, decoder(PLAIN)), Cancellation()
    cancellation.cancel()
    with pytest.raises(LoadCancelledError):
        make_device(device_id).load_tower(spec, TowerWeights(spec), TowerOptions("float32", 8), beside, cancellation)
    beside.close()


def test_packed_weights_are_kept_for_the_next_start(tmp_path: Path) -> None:
    """For this tower alone: another one, or other weights, are packed again."""
    device_id, spec = CPU_IDS[0], SPECS["rope by rows and columns, gated MLP"]
    device = CpuDevice(CpuOptions(cache_dir=str(tmp_path)), isa=make_device(device_id).isa)

    class Stored(TowerWeights):
        def __init__(self, identity: str) -> None:
            super().__init__(spec)
            self.identity = identity
            self.read: list[str] = []

        def __getitem__(self, name: str) -> DenseTensor:
            self.read.append(name)
            return super().__getitem__(name)

    found, read = [], []
    for identity, quantization in (("a", None), ("a", None), ("b", None), ("a", Quantization("int8"))):
        weights, beside = Stored(identity), load(device_id, decoder(PLAIN))
        ours = device.load_tower(spec, weights, TowerOptions("float32", 1024, quantization), beside)
        for thread in threading.enumerate():
            if thread.name == "packed-cache":  # which writes
                thread.join()
        found.append(layers(ours, WINDOWS))
        read.append(set(weights.read))
        beside.close()
    tables = {name for name, _ in spec.tables}
    assert read == [set(tower_shapes(spec)), tables, set(tower_shapes(spec)), set(tower_shapes(spec))]
    assert np.array_equal(found[0], found[1])
    assert len([*tmp_path.glob("*.packed")]) == 3


def test_the_reference_does_not_quantize() -> None:
    with (
        pytest.raises(DeviceError, match="does not quantize"),
        loaded("torch", SPECS["layer norm, MLP with biases"], quantization=Quantization("int8")),
    ):
        pass


@pytest.mark.parametrize("device_id", device_ids()[:2])
def test_a_larger_segment_takes_more_memory(device_id: str) -> None:
    device, spec = make_device(device_id), SPECS["layer norm, MLP with biases"]
    some, more = (device.tower_bytes(spec, TowerWeights(spec), TowerOptions("float32", rows)) for rows in (2048, 4096))
    weights = 4 * sum(int(np.prod(shape)) for shape in tower_shapes(spec).values())
    assert weights + 2048 * 3 * 2 * 72 * 4 < some < more - 2048 * 3 * 2 * 72 * 4
    with pytest.raises(ValueError, match="room"):
        TowerOptions("float32", 0)


def test_positions_and_adapters_take_memory() -> None:
    device, spec = make_device(CPU_IDS[0]), SPECS["content and positions"]
    x, y = np.zeros((40, HIDDEN), np.float32), np.zeros((144, 40), np.float32)
    adapter = LoraAdapter((LowRankUpdate("layers.0.q", x, y, 1.0),))

    def memory(spec: TowerSpec, *adapters: LoraAdapter) -> int:
        return device.tower_bytes(spec, TowerWeights(spec), TowerOptions("float32", 64, adapters=adapters))

    assert memory(spec, adapter) - memory(spec) == x.nbytes + y.nbytes
    # A piece of many segments has 512 rows, and there is a block behind it: two tables of 40 rows for two heads.
    tables = 4 * 4 * 40 * 72 * 2
    plain = SPECS["layer norm, MLP with biases"]
    assert memory(spec) - memory(plain) - tables == pytest.approx((512 + 16) * 2 * 2 * 40 * 4, rel=0.01)


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        ((ResidualBlockSpec(GELU), ResidualBlockSpec(QWEN)), "first residual block"),
        ((ResidualBlockSpec(replace(QWEN, output_gate=True)),), "output gate"),
        ((ResidualBlockSpec(replace(QWEN, sinks=True)),), "sinks"),
        ((ResidualBlockSpec(ShortConvSpec(80, 3)),), "not short_conv"),
    ],
)
def test_a_tower_has_no_other_layers(layer: LayerSpec, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TowerSpec(HIDDEN, (layer,))


@pytest.mark.parametrize(
    "mixer",
    [
        replace(SIGLIP, two_way=False, bias_span=3),
        replace(SIGLIP, two_way=False, disentangled=DisentangledSpec(3, (2, 0, 1))),
        ExpertsSpec(5, 2, 48, sum_bias=True),
        replace(MLP, clipped=True),
    ],
)
def test_a_decoder_has_nothing_that_only_towers_have(mixer: MixerSpec) -> None:
    with pytest.raises(ValueError, match="layer 0 has bounds, biases or positions"):
        decoder_of((ResidualBlockSpec(mixer),))


def test_positions_are_met_by_queries_without_a_temperature() -> None:
    with pytest.raises(ValueError, match="nor a temperature"):
        replace(SIGLIP, disentangled=DisentangledSpec(3, (2, 0, 1)), query_temperature=TemperatureSpec(0.1, 8))
