"""The use of free memory, the order of graphs, and sizes in words."""

from __future__ import annotations

import logging

import pytest

from tidewheel.engine.devices.bucketing import Bucket
from tidewheel.engine.devices.graph.memory import GraphBudget, MemoryUse, capture_order, in_words, plan_memory
from tidewheel.engine.devices.graph.options import GraphOptions

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (-252 * 1024, "-252 KiB"),
        (1536, "1.5 KiB"),
        (int(161.9 * 1024**2), "161.9 MiB"),
        (504 << 20, "504 MiB"),
        (int(7.9234 * GIB), "7.923 GiB"),
        (int(79.158 * GIB), "79.16 GiB"),
        (int(475.24 * GIB), "475.2 GiB"),
        (1007 * GIB, "1007 GiB"),
    ],
)
def test_sizes_have_four_significant_digits(num_bytes: float, words: str) -> None:
    assert in_words(num_bytes) == words


def test_what_something_takes_is_told_in_the_words_of_vllms_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    free = [int(94.62 * GIB)]
    loading = MemoryUse(lambda: (free[0], int(94.62 * GIB)))
    free[0] -= int(14.97 * GIB)
    loading.tell("Loading model weights", "took in total")
    assert caplog.messages[0].startswith(
        "Loading model weights took in total 14.97 GiB of device memory (14.97 GiB/94.62 GiB used) and "
    )


def test_usable_memory_is_shared_between_graphs_and_cache(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan = plan_memory(int(79.16 * GIB), 0.5, GraphOptions(graph_reserved_mem=0.4), "HPUGraphs")
    assert plan.usable == int(79.16 * GIB) // 2
    assert plan.graphs + plan.kv_cache == plan.usable
    assert plan.graphs == pytest.approx(0.4 * plan.usable, abs=1)
    assert plan.margin == plan.free - plan.usable
    assert caplog.messages == [
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), "
        "15.83 GiB reserved for HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache"
    ]


@pytest.mark.parametrize(
    ("options", "graphs_name"),
    [(GraphOptions(enforce_eager=True), "graphs"), (GraphOptions(skip_warmup=True), "graphs"), (GraphOptions(), None)],
)
def test_without_graphs_the_cache_has_all_that_is_usable(
    options: GraphOptions, graphs_name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plan = plan_memory(10 * GIB, 0.9, options, graphs_name)
    assert (plan.graphs, plan.kv_cache) == (0, 9 * GIB)
    assert caplog.messages == [
        "Free device memory: 10 GiB, 9 GiB usable (gpu_memory_utilization=0.9), 9 GiB reserved for KV cache"
    ]


PROMPTS = [Bucket(n, q, q // 128) for n in (4, 2, 1) for q in (1024, 512, 256, 128)]


def test_least_tokens_go_first_then_shorter_then_fewer() -> None:
    order = [b[:2] for b in capture_order(PROMPTS, "min_tokens")]
    assert order[:6] == [(1, 128), (2, 128), (1, 256), (4, 128), (2, 256), (1, 512)]
    assert order[-1] == (4, 1024)


def test_most_sequences_go_first_then_the_shortest() -> None:
    decodes = [Bucket(n, 1, w) for n in (1, 4, 2) for w in (3, 1, 2)]
    assert [(b.batch_size, b.width) for b in capture_order(decodes, "max_bs")] == [
        (n, w) for n in (4, 2, 1) for w in (1, 2, 3)
    ]
    assert [b[:2] for b in capture_order(PROMPTS, "max_bs")][:5] == [(4, 128), (4, 256), (4, 512), (4, 1024), (2, 128)]
    assert [(b.batch_size, b.width) for b in capture_order(decodes, "min_tokens")][:4] == [
        (1, 1),
        (2, 1),
        (1, 2),
        (1, 3),
    ]


def test_a_budget_estimates_a_graph_by_the_tokens_of_those_before() -> None:
    budget = GraphBudget(1000)
    first = Bucket(1, 10, 1)
    assert budget.allows(Bucket(1, 10**6, 1))  # nothing is known yet
    budget.charge(first, 400)
    assert budget.left == 600
    assert budget.allows(Bucket(1, 14, 1))
    assert not budget.allows(Bucket(1, 15, 1))  # it would take all
    other = GraphBudget(7)
    budget.take(other)
    assert (budget.left, other.left) == (607, 0)
    assert not other.allows(first)
