"""Warm-up: what is compiled and captured, in which order, within which memory, and what the log says of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from tidewheel.engine.devices.bucketing import Bucket, BucketPlan, StepSizes
from tidewheel.engine.devices.graph.buckets import plan_buckets
from tidewheel.engine.devices.graph.memory import MemoryPlan, plan_memory
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.graph.warm_up import Phase, warm_up

MIB = 1 << 20
GIB = 1 << 30


class ScriptedLaunches:
    """An executor whose graphs take memory by a script; each launch takes half a second of its clock."""

    def __init__(self, free: int, cost: Callable[[Phase, Bucket], int] = lambda phase, bucket: 0) -> None:
        self.free = free
        self.ran: list[tuple[Phase, Bucket]] = []
        self.captured: list[tuple[Phase, Bucket]] = []
        self.seconds = 0.0
        self._cost = cost

    def free_memory(self) -> int:
        return self.free

    def run(self, phase: Phase, bucket: Bucket) -> None:
        if not self.ran:
            self.free -= 5 * MIB  # what the first compilation keeps
        self.ran.append((phase, bucket))
        self.seconds += 0.5

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        assert (phase, bucket) in self.ran
        assert (phase, bucket) not in self.captured
        self.captured.append((phase, bucket))
        self.free -= self._cost(phase, bucket)
        self.seconds += 0.2


class Progress:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, steps: int) -> None:
        self.calls.append((done, steps))

    def is_complete_of(self, launches: ScriptedLaunches) -> bool:
        """Whether each launch was counted by itself, and all that was to be done is done in the end."""
        counted, steps = len(launches.ran) + len(launches.captured), self.calls[0][1]
        calls = [*((done, steps) for done in range(1, counted + 1)), (steps, steps)]
        return self.calls in (calls, calls[:-1]) and self.calls[-1] == (steps, steps)


def cost_of_the_example(phase: Phase, bucket: Bucket) -> int:
    """What fits the log that vLLM documents for a Gaudi 2 with Llama 3.1 8B."""
    return int(1.4386 * GIB * bucket.num_tokens / 1024) if phase == "prompt" else int(161.9 * MIB / 48)


def documented_example(ratio: float, caplog: pytest.LogCaptureFixture) -> tuple[ScriptedLaunches, list[str]]:
    """Its launches and its log, for a part of the memory that is for prompts."""
    caplog.set_level(logging.INFO)
    options = GraphOptions(
        prompt_bs_bucket_step=32,
        prompt_seq_bucket_max=1024,
        decode_bs_bucket_step=128,
        decode_seq_bucket_max=2048,
        graph_reserved_mem=0.4,
        graph_prompt_ratio=ratio,
    )
    plan = plan_buckets(options, StepSizes(128, 2048, 4, 4096))
    plan = BucketPlan(plan.prompts, (), plan.decodes, plan.block_size, plan.decode_unit)
    memory = plan_memory(int(79.158 * GIB), 0.5, options, "HPUGraphs")
    launches, progress = ScriptedLaunches(int(55.43 * GIB), cost_of_the_example), Progress()
    warm_up(launches, plan, memory, options, progress, clock=lambda: launches.seconds)
    assert progress.is_complete_of(launches)
    return launches, [message for message in caplog.messages if "context" not in message]


PROMPTS = [(n, q) for n in (1, 2, 4) for q in range(128, 1025, 128)]
DECODES = [(n, q) for n in (1, 2, 4) for q in range(128, 2049, 128)]
CAPTURED = PROMPTS[:8] + [(2, q) for q in range(128, 641, 128)] + [(4, 128), (4, 256)]


def test_half_for_prompts_gives_the_documented_log(caplog: pytest.LogCaptureFixture) -> None:
    _, log = documented_example(0.5, caplog)
    assert log[:8] == [
        "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]",
        f"Generated 24 prompt buckets: {PROMPTS}",
        "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]",
        f"Generated 48 decode buckets: {DECODES}",
        "Free device memory: 79.16 GiB, 39.58 GiB usable (gpu_memory_utilization=0.5), 15.83 GiB reserved for "
        "HPUGraphs (VLLM_GRAPH_RESERVED_MEM=0.4), 23.75 GiB reserved for KV cache",
        "[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:55.43 GiB",
        "[Warmup][Prompt][2/24] batch_size:4 seq_len:896 free_mem:55.43 GiB",
        "[Warmup][Prompt][3/24] batch_size:4 seq_len:768 free_mem:55.43 GiB",
    ]
    assert log[28:32] == [
        "[Warmup][Prompt][24/24] batch_size:1 seq_len:128 free_mem:55.43 GiB",
        "[Warmup][Decode][1/48] batch_size:4 seq_len:2048 free_mem:55.43 GiB",
        "[Warmup][Decode][2/48] batch_size:4 seq_len:1920 free_mem:55.43 GiB",
        "[Warmup][Decode][3/48] batch_size:4 seq_len:1792 free_mem:55.43 GiB",
    ]
    assert log[75:79] == [
        "[Warmup][Decode][47/48] batch_size:2 seq_len:128 free_mem:55.43 GiB",
        "[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:55.43 GiB",
        "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 7.923 GiB for prompt and 7.923 GiB for decode "
        "(VLLM_GRAPH_PROMPT_RATIO=0.5)",
        "[Warmup][Graph/Prompt][1/24] batch_size:1 seq_len:128 free_mem:55.43 GiB",
    ]
    assert log[88:91] == [
        "[Warmup][Graph/Prompt][11/24] batch_size:1 seq_len:896 free_mem:48.77 GiB",
        "[Warmup][Graph/Decode][1/48] batch_size:4 seq_len:128 free_mem:47.51 GiB",
        "[Warmup][Graph/Decode][2/48] batch_size:4 seq_len:256 free_mem:47.51 GiB",
    ]
    assert log[136:] == [
        "[Warmup][Graph/Decode][48/48] batch_size:1 seq_len:2048 free_mem:47.36 GiB",
        "[Warmup][Graph/Prompt][12/24] batch_size:4 seq_len:256 free_mem:47.35 GiB",
        "[Warmup][Graph/Prompt][13/24] batch_size:2 seq_len:512 free_mem:45.92 GiB",
        "[Warmup][Graph/Prompt][14/24] batch_size:1 seq_len:1024 free_mem:44.48 GiB",
        "[Warmup][Graph/Prompt][15/24] batch_size:2 seq_len:640 free_mem:43.04 GiB",
        f"Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:{CAPTURED}",
        f"Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:{DECODES}",
        "Warmup finished in 49 secs, allocated 14.19 GiB of device memory",
    ]


def test_a_third_for_prompts_captures_as_many_when_decodes_are_done(caplog: pytest.LogCaptureFixture) -> None:
    launches, log = documented_example(0.3, caplog)
    assert (
        "Using 15.85 GiB/55.43 GiB of free device memory for HPUGraphs, 4.754 GiB for prompt and 11.09 GiB for decode "
        "(VLLM_GRAPH_PROMPT_RATIO=0.3)"
    ) in log
    assert [phase for phase, _ in launches.captured] == ["prompt"] * 8 + ["decode"] * 48 + ["prompt"] * 7
    assert "[Warmup][Graph/Prompt][9/24] batch_size:2 seq_len:384 free_mem:50.77 GiB" in log
    assert log[-3:] == [
        f"Graph/Prompt captured:15 (62.5%) used_mem:14.03 GiB buckets:{CAPTURED}",
        f"Graph/Decode captured:48 (100.0%) used_mem:161.9 MiB buckets:{DECODES}",
        "Warmup finished in 49 secs, allocated 14.19 GiB of device memory",
    ]


PLAN = BucketPlan(
    prompts=(Bucket(1, 16, 1), Bucket(1, 32, 2), Bucket(2, 16, 1)),
    contexts=(Bucket(1, 16, 2), Bucket(1, 16, 4), Bucket(1, 32, 4)),
    decodes=(Bucket(1, 1, 1), Bucket(1, 1, 4), Bucket(2, 1, 2)),
    block_size=16,
)
EVERYTHING = [("prompt", b) for b in PLAN.prompts + PLAN.contexts] + [("decode", b) for b in PLAN.decodes]


def warmed_up(
    launches: ScriptedLaunches,
    options: GraphOptions | None = None,
    memory: MemoryPlan | None = None,
    plan: BucketPlan = PLAN,
    captures: bool = True,
) -> ScriptedLaunches:
    progress = Progress()
    warm_up(launches, plan, memory, options or GraphOptions(), progress, captures=captures)
    assert progress.is_complete_of(launches)
    return launches


def test_each_kind_of_buckets_is_run_from_the_largest_to_the_smallest() -> None:
    launches = warmed_up(ScriptedLaunches(GIB))
    assert [bucket for _, bucket in launches.ran] == [
        *(Bucket(1, 32, 2), Bucket(2, 16, 1), Bucket(1, 16, 1)),
        *(Bucket(1, 1, 4), Bucket(2, 1, 2), Bucket(1, 1, 1)),
        *(Bucket(1, 32, 4), Bucket(1, 16, 4), Bucket(1, 16, 2)),
    ]


def test_without_a_plan_for_memory_everything_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    launches = warmed_up(ScriptedLaunches(0, lambda phase, bucket: GIB))
    assert sorted(launches.captured) == sorted(EVERYTHING)
    assert not any(message.startswith("Using ") for message in caplog.messages)
    assert "[Warmup][Decode][1/3] batch_size:1 num_blocks:4 free_mem:-5 MiB" in caplog.messages
    assert "[Warmup][Context][1/3] batch_size:1 seq_len:32 num_blocks:4 free_mem:-5 MiB" in caplog.messages
    assert "Graph/Context captured:3 (100.0%) used_mem:3 GiB buckets:[(1, 16, 2), (1, 16, 4), (1, 32, 4)]" in (
        caplog.messages
    )


@pytest.mark.parametrize(
    ("options", "captures"),
    [(GraphOptions(enforce_eager=True), True), (GraphOptions(), False)],
    ids=["enforce_eager", "a device without graphs"],
)
def test_without_graphs_everything_is_run(options: GraphOptions, captures: bool) -> None:
    launches = warmed_up(ScriptedLaunches(GIB), options, captures=captures)
    assert sorted(launches.ran) == sorted(EVERYTHING)
    assert launches.captured == []


MEMORY = MemoryPlan(GIB, GIB, 0, GIB)


@pytest.mark.parametrize(
    ("options", "memory", "captures", "said"),
    [
        ({"enforce_eager": True, "graph_prompt_ratio": 0.5}, MEMORY, True, "--graph-prompt-ratio .* no graphs are"),
        ({"graph_prompt_strategy": "max_bs"}, MEMORY, False, "--graph-prompt-strategy .* no graphs are"),
        ({"enforce_eager": True}, MEMORY, True, None),
        ({"graph_reserved_mem": 0.5}, None, True, "--graph-reserved-mem .* no memory of its own"),
        ({"graph_prompt_strategy": "max_bs", "graph_prompt_ratio": 0.5}, MEMORY, True, None),
    ],
)
def test_options_that_are_given_for_nothing_are_named(
    options: dict[str, Any],
    memory: MemoryPlan | None,
    captures: bool,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warmed_up(ScriptedLaunches(GIB), GraphOptions(**options), memory, captures=captures)
    if said is None:
        assert caplog.messages == []
    else:
        (message,) = caplog.messages
        assert re.match(said.replace(" .* ", " has no effect: .*"), message)


def test_warm_up_can_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    launches, progress = ScriptedLaunches(GIB), Progress()
    warm_up(launches, PLAN, None, GraphOptions(skip_warmup=True), progress)
    assert launches.ran == launches.captured == progress.calls == []
    assert "No warm-up (VLLM_SKIP_WARMUP)" in caplog.text


@pytest.mark.parametrize(("longest", "widest"), [(64, 4), (63, 4), (48, 3), (32, 2), (17, 2), (16, 1), (1, 1)])
def test_longer_sequences_are_run_but_not_captured(longest: int, widest: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    launches = warmed_up(ScriptedLaunches(GIB), GraphOptions(max_seq_len_to_capture=longest))
    assert sorted(launches.ran) == sorted(EVERYTHING)
    assert sorted(launches.captured) == sorted(step for step in EVERYTHING if step[1].width <= widest)
    too_long = len(EVERYTHING) - len(launches.captured)
    said = f"{too_long} buckets get no graphs: they are longer than --max-seq-len-to-capture {longest}"
    assert (said in caplog.messages) == (too_long > 0)


@pytest.mark.parametrize(
    ("free", "captured"),
    [
        (1000 * MIB, [(2, 16), (2, 64), (1, 16), (1, 64)]),
        (60 * MIB, [(2, 16), (1, 16)]),
        (0, []),
    ],
)
def test_a_graph_that_does_not_fit_is_skipped_and_later_ones_are_tried(
    free: int, captured: list[tuple[int, int]]
) -> None:
    options = GraphOptions(graph_prompt_strategy="max_bs", graph_prompt_ratio=1)
    plan = BucketPlan((Bucket(1, 16, 1), Bucket(1, 64, 4), Bucket(2, 16, 1), Bucket(2, 64, 4)), (), (), 16)
    launches = ScriptedLaunches(free, lambda phase, bucket: bucket.num_tokens * MIB)
    warmed_up(launches, options, MemoryPlan(free, free, 0, free), plan)
    assert [bucket[:2] for _, bucket in launches.captured] == captured


def test_decodes_get_what_complete_prompts_leave() -> None:
    options = GraphOptions(graph_prompt_ratio=0.9)
    decodes = tuple(Bucket(1, 1, width) for width in range(1, 9))
    free = 105 * MIB
    launches = ScriptedLaunches(free, lambda phase, bucket: 10 * MIB)
    warmed_up(launches, options, MemoryPlan(free, free, 0, free), BucketPlan((Bucket(1, 16, 1),), (), decodes, 16))
    assert launches.captured == [("prompt", Bucket(1, 16, 1))] + [("decode", bucket) for bucket in decodes]


def test_contexts_get_what_prompts_and_decodes_leave() -> None:
    free = 100 * MIB
    launches = ScriptedLaunches(free, lambda phase, bucket: (8 if phase == "prompt" else 18) * MIB)
    warmed_up(launches, GraphOptions(), MemoryPlan(free, free, 0, free))
    assert launches.captured == [
        *(("prompt", bucket) for bucket in (Bucket(1, 16, 1), Bucket(2, 16, 1), Bucket(1, 32, 2))),
        *(("decode", bucket) for bucket in (Bucket(2, 1, 2), Bucket(1, 1, 1), Bucket(1, 1, 4))),
        *(("prompt", bucket) for bucket in (Bucket(1, 16, 2), Bucket(1, 16, 4))),
    ]


def test_graphs_leave_the_margin_alone() -> None:
    free = 100 * MIB
    memory = MemoryPlan(free, usable=70 * MIB, graphs=20 * MIB, kv_cache=50 * MIB)
    launches = ScriptedLaunches(50 * MIB, lambda phase, bucket: bucket.num_tokens * MIB // 6)  # the cache is there
    warmed_up(launches, GraphOptions(), memory)
    assert 0 < len(launches.captured) < len(EVERYTHING)
    assert launches.free >= memory.margin
    assert warmed_up(ScriptedLaunches(30 * MIB), GraphOptions(), memory).captured == []
