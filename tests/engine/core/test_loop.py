"""The engine thread beside grammars and other work: what runs in its steps, and who gets their tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest
from engine.driving import Driver
from engine.fake_executor import FakeExecutor
from engine.tiny_tokenizers import tiny

from tidewheel.engine.constraints.constraint import SequenceConstraint, TokenConstraints
from tidewheel.engine.constraints.lookahead import Lookahead
from tidewheel.engine.constraints.masks import MaskWriter
from tidewheel.engine.core.engine_core_outputs import EngineCoreOutputs
from tidewheel.engine.core.loop import EngineLoop
from tidewheel.engine.cost_model import CostModel
from tidewheel.engine.devices.batch import StepBatch, StepOutput, TokenMasks
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.hosting.turns import Turns
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.scheduler import Scheduler
from tidewheel.engine.sequences.sequence import Sequence
from tidewheel.engine.side_work import SideWork

LIMITS = ExecutorLimits(16, 512, max_num_seqs=8, max_num_batched_tokens=1024)
PLAIN, CONSTRAINED, PROMPTS = 0, (1, 2, 3), (4, 5, 6)
PROMPT_LEN = 1000
MAX_STEP_MS = 20.0


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedExecutor(FakeExecutor):
    """Takes a millisecond a step and 0.1 a token. Long prompts arrive when it has run 40 steps."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(LIMITS, 256)
        self.clock = clock
        self.loop: EngineLoop | None = None
        self.loads: list[int] = []  # tokens

    def step(self, batch: StepBatch) -> StepOutput:
        self.loads.append(len(batch.token_ids))
        self.clock.now_s += 1e-3 + 1e-4 * len(batch.token_ids)
        if self.num_steps == 40 and self.loop is not None:
            for key in PROMPTS:
                self.loop.add([sequence(key, PROMPT_LEN, 1)])
        return super().step(batch)


class SlowMasks(MaskWriter):
    """Masks that keep the device waiting, now for long and now for longer."""

    def __init__(self, clock: Clock, longest_s: float) -> None:
        super().__init__(256)
        self.clock = clock
        self.longest_s = longest_s
        self.num_steps = 0

    def start(
        self, constraints: Seq[SequenceConstraint | None], lookaheads: Seq[tuple[int, Lookahead]] = ()
    ) -> TokenMasks | None:
        masks = super().start(constraints, lookaheads)
        if masks is not None:
            self.num_steps += 1
            until_s = self.longest_s * (self.num_steps % 7) / 6
            late = [until_s]  # once: who asks again need not wait

            def written() -> None:
                self.clock.now_s += late.pop() if late else 0.0

            masks.written = written
        return masks


class Texts(SideWork):
    """Work that never ends. A piece takes as long as it should."""

    def __init__(self, clock: Clock, executor: TimedExecutor) -> None:
        self.clock, self.executor = clock, executor
        self.used_s: dict[int, float] = {}  # by the number of steps before

    @property
    def is_waiting(self) -> bool:
        return True

    def run_piece(self, piece_s: float, *, nothing_runs: bool) -> bool:
        self.clock.now_s += piece_s
        steps = self.executor.num_steps
        self.used_s[steps] = self.used_s.get(steps, 0.0) + piece_s
        return True

    def close(self, failure: BaseException | None = None) -> None:
        return


def sequence(key: int, prompt_len: int, max_tokens: int, *, constrained: bool = False) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    wanted = TokenConstraints(allowed_token_ids=tuple(range(10, 90)))
    constraint = SequenceConstraint(wanted, sampling, tiny("byte-level"), eos_ids=(), vocab_size=256)
    return Sequence(
        key,
        np.full(prompt_len, key, np.int32),
        sampling,
        seed=key,
        arrival=key,
        max_length=2048,
        constraint=constraint if constrained else None,
    )


Served: TypeAlias = tuple[list[int], list[list[int]], dict[int, list[int]]]


def serve(monkeypatch: pytest.MonkeyPatch, longest_s: float, beside: list[float] | None = None) -> Served:
    """Tokens that each step runs, sequences that each step has a token for, and the tokens of each.

    With `beside` there is other work between steps, and the seconds between two steps' ends are put there.
    """
    clock, ended = Clock(), threading.Event()
    monkeypatch.setattr(time, "perf_counter", clock)
    executor = TimedExecutor(clock)
    scheduler = Scheduler(CostModel(MAX_STEP_MS), LIMITS)
    keys_of_steps: list[list[int]] = []
    tokens: dict[int, list[int]] = {}
    ends_s: list[float] = []
    unfinished = {PLAIN, *CONSTRAINED, *PROMPTS}

    def deliver(outputs: EngineCoreOutputs) -> None:
        if outputs.failure is not None:
            ended.set()
        keys_of_steps.append(outputs.keys)
        ends_s.append(clock.now_s)
        for key, token in zip(outputs.keys, outputs.token_ids, strict=True):
            tokens.setdefault(key, []).append(token)
        unfinished.difference_update(end.key for end in outputs.finished)
        if not unfinished:
            ended.set()

    loop = executor.loop = EngineLoop(scheduler, executor, SlowMasks(clock, longest_s), deliver)
    texts = Texts(clock, executor)
    if beside is not None:
        loop.add_side_work(texts)
    for key in (PLAIN, *CONSTRAINED):
        loop.add([sequence(key, 3, 200, constrained=key != PLAIN)])
    loop.start()
    assert ended.wait(60)
    loop.stop()
    assert loop.join(60)
    assert not unfinished
    if beside is not None:
        beside += [after - before for before, after in pairwise(ends_s)]
        assert all(texts.used_s[step] >= 0.25 * MAX_STEP_MS / 1e3 for step in range(1, executor.num_steps))
    return executor.loads, keys_of_steps, tokens


def test_slow_grammars_change_neither_what_runs_in_a_step_nor_whose_step_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their masks are no time of the device's: it would not be shorter with fewer tokens of prompts."""
    loads, keys_of_steps, tokens = serve(monkeypatch, 0.0)
    assert sum(load > 100 for load in loads) >= 10, "prompts are computed beside the streams, in chunks of some size"
    assert all({PLAIN, *CONSTRAINED} <= set(keys) for keys in keys_of_steps[:200]), "nobody is left out of a step"
    assert serve(monkeypatch, 0.3) == (loads, keys_of_steps, tokens)


def test_work_beside_the_steps_goes_on_and_neither_delays_tokens_nor_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time comes off the time of prompts, so that all together stays within a step's."""
    _, _, alone = serve(monkeypatch, 0.0)
    between_s: list[float] = []
    loads, _, tokens = serve(monkeypatch, 0.0, between_s)
    assert tokens == alone
    assert max(loads) > 50, "prompts are computed beside it"
    assert sorted(between_s)[int(0.99 * len(between_s))] <= 1.01 * MAX_STEP_MS / 1e3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_device_that_runs_ahead_gives_the_same_tokens(async_scheduling: bool) -> None:
    executor = FakeExecutor(replace(LIMITS, async_scheduling=async_scheduling), 256)
    ended, tokens = threading.Event(), dict[int, list[int]]()
    unfinished = set(range(6))

    def deliver(outputs: EngineCoreOutputs) -> None:
        for key, token in zip(outputs.keys, outputs.token_ids, strict=True):
            tokens.setdefault(key, []).append(token)
        unfinished.difference_update(end.key for end in outputs.finished)
        if not unfinished or outputs.failure is not None:
            ended.set()

    loop = EngineLoop(Scheduler(CostModel(max_step_ms=20.0), executor.limits), executor, MaskWriter(256), deliver)
    for key in range(6):
        loop.add([sequence(key, 3 + key, 20 + 7 * key)])
    loop.start()
    assert ended.wait(60)
    loop.stop()
    assert loop.join(60)
    assert not unfinished
    assert (executor.num_followed > 20) == async_scheduling
    for key, got in tokens.items():
        alone = Driver(FakeExecutor(LIMITS, 256), 2048)
        alone.scheduler.add([sequence(key, 3 + key, 20 + 7 * key)])
        alone.sampled[key], alone.scored[key] = [], []
        alone.run()
        assert got == alone.tokens(key)


def test_prompts_of_one_model_do_not_delay_the_tokens_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute on the same cores, in turns; each gives the tokens that it gives alone."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    turns = Turns(clock)
    both_ended, ends_s = threading.Event(), list[float]()
    tokens: list[dict[int, list[int]]] = [{}, {}]
    unfinished = {(0, key) for key in PROMPTS} | {(1, key) for key in CONSTRAINED}

    def loop_of(model: int) -> tuple[EngineLoop, TimedExecutor]:
        def deliver(outputs: EngineCoreOutputs) -> None:
            if model == 1 and len(unfinished) > len(CONSTRAINED):  # while there are prompts
                ends_s.append(clock.now_s)
            for key, token in zip(outputs.keys, outputs.token_ids, strict=True):
                tokens[model].setdefault(key, []).append(token)
            unfinished.difference_update((model, end.key) for end in outputs.finished)
            if not unfinished or outputs.failure is not None:
                both_ended.set()

        executor = TimedExecutor(clock)
        scheduler = Scheduler(CostModel(MAX_STEP_MS), LIMITS)
        return EngineLoop(scheduler, executor, MaskWriter(256), deliver, turn=turns.join()), executor

    loops = [loop_of(model) for model in range(2)]
    wanted = [[sequence(key, PROMPT_LEN, 1) for key in PROMPTS], [sequence(key, 3, 600) for key in CONSTRAINED]]
    gate = turns.join()
    gate.take()
    for (loop, _), sequences in zip(loops, wanted, strict=True):
        for one in sequences:
            loop.add([one])
        loop.start()
    while turns.num_waiting < 2:
        pass
    gate.give_back()
    assert both_ended.wait(60)
    for loop, _ in loops:
        loop.stop()
        assert loop.join(60)
    assert not unfinished
    gaps_s = sorted(after - before for before, after in pairwise(ends_s))
    assert gaps_s[int(0.95 * len(gaps_s))] <= 1.3 * MAX_STEP_MS / 1e3
    assert max(loops[0][1].loads) <= 10 * MAX_STEP_MS, "no more than fits a step"
    for model, sequences in enumerate(
        [[(key, PROMPT_LEN, 1) for key in PROMPTS], [(key, 3, 600) for key in CONSTRAINED]]
    ):
        for key, prompt_len, num_tokens in sequences:
            alone = Driver(FakeExecutor(LIMITS, 256), 2048)
            alone.scheduler.add([sequence(key, prompt_len, num_tokens)])
            alone.sampled[key], alone.scored[key] = [], []
            alone.run()
            assert tokens[model][key] == alone.tokens(key)
