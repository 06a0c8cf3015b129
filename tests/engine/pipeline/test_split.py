"""Which stage has which layers, and what is said of a stage that lags."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise

import models_zoo
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec, StageSpec, layer_bytes_of, stage_tensors, tensor_shapes
from tidewheel.engine.pipeline.split import split_layers, stage_bytes
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
