"""The scheduler drives the graph executor through prefixes, preemption, drafts and aborts to the reference's tokens."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
from engine.driving import Driver, Job, Oracle, random_clock

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.batch import StepBatch
from tidewheel.engine.devices.executor import Pending
from tidewheel.engine.sampling_params import SamplingParams

torch = pytest.importorskip("torch")

from engine.devices.graph.served import (  # noqa: E402
    FEW_BUCKETS,
    MAX_LENGTH,
    MIXED,
    SPEC,
    load,
    reference,
    serve,
    storm,
)

from engine.devices.graph import adapters  # noqa: E402
from tidewheel.engine.devices.graph.cpu import CpuAdapter  # noqa: E402
from tidewheel.engine.devices.graph.executor import GraphExecutor  # noqa: E402
from tidewheel.engine.models.spec import DecoderSpec  # noqa: E402

EAGER = dataclasses.replace(FEW_BUCKETS, enforce_eager=True)


def graph_executor(adapter: type[CpuAdapter], spec: DecoderSpec = SPEC) -> GraphExecutor:
    executor = load(adapters.device(adapter, False, EAGER), spec=spec)
    assert isinstance(executor, GraphExecutor)
    return executor


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(96) for _ in range(40)]
    return [
        common[: rng.choice([0, 20, 40])] + [rng.randrange(96) for _ in range(rng.randint(1, 40))] for _ in range(12)
    ]


@functools.cache
def random_jobs(seed: int) -> tuple[list[Job], list[list[int]]]:
    """Jobs, and the tokens of each alone."""
    rng = random.Random(seed)
    jobs = [
        Job(
            tuple(prompt), SamplingParams(max_tokens=rng.randint(4, 16), temperature=rng.choice([0.0, 0.9])), seed=index
        )
        for index, prompt in enumerate(prompts(seed))
    ]
    return jobs, alone(jobs)


def alone(jobs: list[Job]) -> list[list[int]]:
    """The tokens of each job on the torch device, one after the other."""
    executor = load(get_device("torch"))
    return [serve(executor, [job])[0] for job in jobs]


def test_a_storm_gives_the_reference_tokens() -> None:
    assert serve(graph_executor(CpuAdapter), storm()) == reference("torch", "float32")


# The fourth job begins as the first one did. The reference computes recurrences token by token.
def test_layers_of_all_kinds_give_the_reference_tokens() -> None:
    expected = reference("torch", "float32", MIXED, 4)
    assert serve(graph_executor(CpuAdapter, MIXED), storm()[:4]) == expected


@pytest.mark.parametrize("logprobs", [None, 1])
def test_decodes_go_on_from_tokens_that_the_host_has_not_seen(
    logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows: list[bool] = []
    start = GraphExecutor.start

    def noting_start(executor: GraphExecutor, batch: StepBatch) -> Pending:
        follows.append(batch.is_async)
        return start(executor, batch)

    jobs = [
        Job(
            tuple(prompt),
            # The host samples rows with log-probabilities.
            SamplingParams(max_tokens=30 - 4 * i, temperature=0.9 * (i % 2), logprobs=logprobs if i == 0 else None),
            seed=i,
        )
        for i, prompt in enumerate(prompts(1)[:3])
    ]
    expected = alone(jobs)
    monkeypatch.setattr(GraphExecutor, "start", noting_start)
    assert serve(graph_executor(adapters.MarkingAdapter), jobs) == expected
    assert follows.count(True) > 15
    follows.clear()
    assert serve(graph_executor(CpuAdapter), jobs) == expected
    assert not any(follows)


# Seed 0 has no drafts, so that steps of an adapter that marks them run ahead.
ALWAYS = [(0, adapters.MarkingAdapter), (1, CpuAdapter)]


# Sequences are computed again after each preemption, with torch on one thread.
@pytest.mark.parametrize(
    ("seed", "adapter"),
    [
        pytest.param(seed, adapter, marks=() if (seed, adapter) in ALWAYS else pytest.mark.sweep)
        for seed in range(3)
        for adapter in (CpuAdapter, adapters.MarkingAdapter)
    ],
)
def test_preemption_drafts_and_aborts_change_no_tokens(seed: int, adapter: type[CpuAdapter]) -> None:
    rng = random.Random(seed)
    jobs, expected = random_jobs(seed)
    executor, oracle = graph_executor(adapter), Oracle(seed)
    tight = dataclasses.replace(
        executor.limits,
        num_blocks=8,
        window_groups=tuple(dataclasses.replace(group, num_blocks=8) for group in executor.limits.window_groups),
        max_num_batched_tokens=rng.choice([20, 64, MAX_LENGTH]),
    )
    drafter = oracle if seed else None  # with drafts no step runs ahead
    driver = Driver(executor, MAX_LENGTH, vocab_size=96, clock=random_clock(seed), limits=tight, drafter=drafter)
    keys = []
    for index, job in enumerate(jobs):
        keys += driver.add(job)
        oracle.tell(keys[-1], expected[index])
        if index % 5 == 4:
            driver.abort(keys[rng.randrange(len(keys))])
        driver.step()
    driver.run()
    for key, tokens in zip(keys, expected, strict=True):
        assert driver.tokens(key) == tokens[: len(driver.tokens(key))]
    assert sum(driver.tokens(key) == tokens for key, tokens in zip(keys, expected, strict=True)) >= len(jobs) - 2
