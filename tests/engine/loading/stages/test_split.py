"""Which stage has which layers, by what it is measured for, and what is said of a stage that lags."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import models_zoo
import mtp_zoo
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.stages.split import StageRoom, split_layers, stage_bytes
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec, StageSpec, layer_bytes_of, stage_tensors, tensor_shapes
from tidewheel.engine.pipeline.speed import StageCores, StageSpeed, cores_at, measure, slowness, stage_speeds
from tidewheel.engine.pipeline.stage_times import StageTimes
from tidewheel.engine.weights import open_source


def spec_of(name: str, layers: int | None = None) -> DecoderSpec:
    spec = describe(open_source(str(models_zoo.folder(name))).config, None).spec
    return spec if layers is None else dataclasses.replace(spec, layers=spec.layers[:1] * layers)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9))
def test_the_largest_stage_is_as_small_as_can_be(layers: int, stages: int) -> None:
    spec = spec_of("llama", layers)
    if stages > layers:
        with pytest.raises(ModelError, match=f"more than the {layers} stages"):
            split_layers(spec, stages, {})
        return
    found = split_layers(spec, stages, {})
    assert [stage.begin for stage in found] == [0, *(stage.end for stage in found[:-1])]
    assert found[-1].end == layers
    sizes = layer_bytes_of(spec, {name: 4 * int(np.prod(shape)) for name, shape in tensor_shapes(spec).items()})
    best = min(
        max(sum(sizes[a:b]) for a, b in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), stages - 1)
    )
    assert max(sum(sizes[stage.begin : stage.end]) for stage in found) == best


@settings(deadline=None)
@given(st.integers(2, 9), st.lists(st.floats(1.0, 5.0), min_size=2, max_size=4))
def test_the_slowest_stage_takes_as_little_time_as_can_be(layers: int, slow: list[float]) -> None:
    if len(slow) > layers:
        return
    spec = spec_of("llama", layers)
    sizes = layer_bytes_of(spec, {name: 4 * int(np.prod(shape)) for name, shape in tensor_shapes(spec).items()})

    def slowest(ends: Sequence[int]) -> float:
        return max(sum(sizes[a:b]) * times for (a, b), times in zip(pairwise((0, *ends)), slow, strict=True))

    found = split_layers(spec, len(slow), {}, slow)
    best = min(slowest((*cuts, layers)) for cuts in combinations(range(1, layers), len(slow) - 1))
    assert slowest([stage.end for stage in found]) == best


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stages_that_are_nearly_as_fast_have_the_layers_of_equal_ones(stages: int) -> None:
    spec = spec_of("llama", 40)
    speeds = [StageSpeed(1e10 * (1 - 0.09 * (index % 2)), 1e12) for index in range(stages)]
    assert split_layers(spec, stages, {}, slowness(speeds)) == split_layers(spec, stages, {})


def test_half_of_a_stages_time_is_reading_and_half_is_computing() -> None:
    assert slowness([StageSpeed(40e9, 1e12), StageSpeed(20e9, 1e12), StageSpeed(20e9, 0.5e12)]) == [1.0, 1.5, 2.0]


def test_a_stage_gets_no_more_than_its_memory_holds() -> None:
    spec = spec_of("llama", 20)
    sizes = [stage_bytes(spec, stage, {}) for stage in split_layers(spec, 2, {})]
    whole = sum(sizes)

    def layers(*room: int | None, beside: int = 0) -> list[int]:
        return [stage.end - stage.begin for stage in split_layers(spec, 2, {}, [1.0, 1.0], StageRoom(room, beside))]

    equal = layers(None, None)
    assert layers(whole, whole) == equal
    small = layers(sizes[0] // 2, whole)
    assert 0 < small[0] < equal[0]
    assert small[0] > layers(sizes[0] // 2, whole, beside=whole // 2)[0] > 0  # whose KV cache goes with its layers
    assert layers(whole // 9, whole // 3)[0] < equal[0]  # nothing fits: it is missed by least
    assert layers(whole // 9, None)[0] < equal[0]


def test_cores_that_are_alike_are_not_measured() -> None:
    def fail(stages: Sequence[int]) -> list[StageSpeed]:
        raise AssertionError("measured")

    assert stage_speeds([StageCores("a", 4, 3000.0), StageCores("a", 4, 2800.0)], fail) is None


@pytest.mark.parametrize(
    "other", [StageCores("b", 4, 3000.0), StageCores("a", 2, 3000.0), StageCores("a", 4, 2000.0)], ids=str
)
def test_cores_that_differ_are_measured_until_they_are_as_fast(other: StageCores) -> None:
    cores = [StageCores("a", 4, 3000.0), other, StageCores("a", 4, 3000.0)]
    rounds = iter([[9e9, 1e9], [2e9, 5e9], [7e9, 8.5e9]])
    asked: list[Sequence[int]] = []

    def measure(stages: Sequence[int]) -> list[StageSpeed]:
        asked.append(stages)
        return [StageSpeed(read, 1e12) for read in next(rounds)]

    found = stage_speeds(cores, measure)
    assert found == [StageSpeed(9e9, 1e12), StageSpeed(8.5e9, 1e12), StageSpeed(9e9, 1e12)]
    assert asked == [[0, 1]] * 3


def test_cores_that_stay_slower_have_their_best_speed() -> None:
    speeds = iter([1e9, 3e9, 2e9, 2.5e9])

    def measure(stages: Sequence[int]) -> list[StageSpeed]:
        return [StageSpeed(9e9, 1e12), StageSpeed(next(speeds), 1e12)]

    found = stage_speeds([StageCores("a", 4, 0.0), StageCores("b", 4, 0.0)], measure)
    assert found == [StageSpeed(9e9, 1e12), StageSpeed(3e9, 1e12)]


def test_this_machines_cores_have_a_speed(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    found = measure("auto", cpus, "float32_flops")
    assert found.read_bytes > 1e6
    assert found.operations > 1e6
    for cpu, khz in ((0, "5200000"), (1, "3900000\n")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "cpuinfo_max_freq").write_text(khz)
    assert cores_at("a", [0, 1], tmp_path) == StageCores("a", 2, 4550.0)
    assert cores_at("a", [7], tmp_path) == StageCores("a", 1, 0.0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "opt-350m", "gemma3n", "gpt2"])
def test_each_weight_is_in_one_stage_but_for_a_tied_embedding(name: str) -> None:
    spec = spec_of(name)
    stages = split_layers(spec, 2, {})
    names = [tensor for stage in stages for tensor in stage_tensors(spec, stage)]
    twice = ["embed.weight"] if spec.head.tied else []
    assert sorted(names) == sorted([*tensor_shapes(spec), *twice])
    whole = StageSpec(0, len(spec.layers), len(spec.layers))
    extra = 4 * spec.vocab_size * spec.embedding.size if spec.head.tied else 0
    assert sum(stage_bytes(spec, stage, {}) for stage in stages) == stage_bytes(spec, whole, {}) + extra


@pytest.mark.parametrize("name", ["qwen3_5", "glm4-moe"])
def test_a_layer_for_drafts_is_in_the_last_stage_with_the_embedding(name: str) -> None:
    spec = describe(open_source(str(mtp_zoo.folder(name))).config, None).with_mtp().spec
    first, last = (stage_tensors(spec, stage) for stage in split_layers(spec, 2, {}))
    assert not any(tensor.startswith("mtp.") for tensor in first)
    assert {tensor for tensor in tensor_shapes(spec) if tensor.startswith("mtp.")} < {*last}
    assert {*first} & {*last} == {"embed.weight"}


@pytest.mark.parametrize("on_one_machine", [True, False])
def test_a_stage_that_lags_is_named(on_one_machine: bool, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    times = StageTimes(["the first", "the second"], share_clock=on_one_machine, clock=lambda: now[0])
    for seconds in ([0.1, 0.11], [0.1, 0.3]):
        for _ in range(100):
            now[0] += 1.0
            times.observe(np.array([(0.0, 0.0, took) for took in seconds]), 0.0, None)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.split(" a step")[0] == "the second takes 300.0 ms"
    assert ("--threads-bind" in said) == on_one_machine  # which stages on Ray refuse


def test_hops_are_those_whose_time_is_known() -> None:
    times = StageTimes(["a", "b"])
    nan = float("nan")
    times.observe(np.array([(1.0, 1.5, 2.0), (2.25, 2.5, 4.0)]), 0.5, 4.5)
    times.observe(np.array([(2.0, 2.0, 3.0), (nan, 4.0, 5.0)]), 1.5, None)  # the second had not looked yet
    first, second = times.stats()
    assert (first.steps, first.computing_s, first.hops, first.hop_s) == (2, 1.5, 1, 0.25)
    assert (second.steps, second.computing_s, second.hops, second.hop_s) == (2, 2.5, 1, 0.5)


def test_clocks_that_differ_give_the_mean_of_all_hops() -> None:
    times = StageTimes(["a", "b"], share_clock=False)
    times.observe(np.array([(1000.0, 1000.5, 1001.0), (70.0, 70.5, 72.0)]), 5.0, 8.75)
    assert [(stage.hops, stage.hop_s) for stage in times.stats()] == [(1, 0.25), (1, 0.25)]
