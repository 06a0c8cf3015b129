"""The cost model against made-up machines: steps stay near their limit, and prompts always advance."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from tidewheel.engine.cost_model import CostModel, StepLoad

LIMIT_MS = 100.0


@dataclass
class Machine:
    """Step times in ms; `noise` is the relative spread, and one step in a hundred takes five times as long."""

    base: float
    decode: float
    prefill: float
    pair: float
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def exact(self, load: StepLoad) -> float:
        return (
            self.base
            + self.decode * load.num_decodes
            + self.prefill * load.prefill_tokens
            + self.pair * (load.decode_pairs + load.prefill_pairs)
        )

    def time(self, load: StepLoad) -> float:
        outlier = 5.0 if self.noise and self.rng.random() < 0.01 else 1.0
        return self.exact(load) * (1 + self.rng.uniform(-self.noise, self.noise)) * outlier


MACHINES = {
    "laptop": Machine(20.0, 0.5, 1.5, 1e-5),
    "server": Machine(3.0, 0.1, 0.05, 1e-7),
    "slow": Machine(60.0, 2.0, 12.0, 1e-4),
    "tiny model": Machine(0.3, 0.01, 0.004, 1e-8),
    "noisy": Machine(20.0, 0.5, 1.5, 1e-5, noise=0.3),
}


def serve(model: CostModel, machine: Machine, *, decodes: int, prompts: list[int]) -> tuple[list[float], list[int]]:
    """Decode all along while prompts are prefilled one after another; exact step times, and chunks."""
    times, chunks = [], []
    context = 200
    for prompt in prompts:
        start = 0
        while start < prompt:
            context += 1
            load = StepLoad(decodes, decodes * context)
            tokens = min(model.chunk_tokens(load, start, model.limit_ms(load)), prompt - start)
            assert tokens > 0
            step = load.plus_chunk(start, tokens)
            model.observe(step, machine.time(step))
            times.append(machine.exact(step))
            chunks.append(tokens)
            start += tokens
        for _ in range(20):
            context += 1
            load = StepLoad(decodes, decodes * context)
            model.observe(load, machine.time(load))
    return times, chunks


@pytest.mark.parametrize("name", MACHINES)
def test_steps_stay_near_the_limit_and_make_use_of_it(name: str) -> None:
    machine = MACHINES[name]
    model = CostModel(LIMIT_MS)
    times, _ = serve(model, machine, decodes=8, prompts=[1200] * 12)
    smallest = machine.exact(StepLoad(8, 8 * 1000, 16))
    allowed = max(LIMIT_MS, smallest, 1.25 * machine.exact(StepLoad(8, 8 * 1000)))
    settled = sorted(times[len(times) // 4 :])
    assert settled[int(0.97 * len(settled))] <= 1.5 * allowed
    assert max(times[3:]) <= 3 * allowed
    if name in ("laptop", "server", "noisy"):
        assert settled[len(settled) // 2] >= 0.5 * min(LIMIT_MS, machine.exact(StepLoad(8, 8 * 1000, 1200, 720_000)))


def test_the_first_chunk_is_small_and_grows_at_most_twofold() -> None:
    _, chunks = serve(CostModel(LIMIT_MS), Machine(1.0, 0.1, 0.01, 1e-9), decodes=4, prompts=[100_000])
    assert chunks[0] <= 128
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(chunks))
    assert max(chunks) > 4000


def test_decodes_that_take_too_long_alone_do_not_stop_prefill() -> None:
    machine = Machine(400.0, 1.0, 2.0, 1e-5)
    times, chunks = serve(CostModel(LIMIT_MS), machine, decodes=32, prompts=[2000] * 3)
    assert min(chunks[:-1]) >= 16
    assert max(times) < 1.5 * machine.exact(StepLoad(32, 32 * 400))


def test_chunks_shrink_as_the_context_makes_them_dearer() -> None:
    machine = Machine(10.0, 0.1, 0.2, 2e-5)
    _, chunks = serve(CostModel(LIMIT_MS), machine, decodes=2, prompts=[30_000])
    assert sum(chunks[-6:-1]) < 0.6 * max(chunks) * 5


def test_a_change_of_the_machine_is_followed() -> None:
    model = CostModel(LIMIT_MS)
    serve(model, Machine(10.0, 0.1, 0.5, 1e-6), decodes=4, prompts=[2000] * 4)
    times, _ = serve(model, Machine(20.0, 0.2, 2.0, 1e-6), decodes=4, prompts=[2000] * 4)
    assert max(times[5:]) <= 1.5 * LIMIT_MS


def test_one_stalled_step_is_not_the_new_normal() -> None:
    model = CostModel(LIMIT_MS)
    machine = Machine(10.0, 0.1, 0.5, 1e-6)
    serve(model, machine, decodes=4, prompts=[2000] * 4)
    load = StepLoad(4, 4000)
    before = model.predict_ms(load)
    model.observe(load, 5_000.0)
    assert model.predict_ms(load) < 3 * before


def test_steps_that_stall_now_and_then_do_not_count_for_more_than_they_are() -> None:
    """As with a small model on a shared machine: one step in a hundred takes thirty times as long as the others."""
    model, load = CostModel(LIMIT_MS), StepLoad(1, 100)
    expected = []
    for number in range(5000):
        model.observe(load, 10.0 if number % 101 == 100 else 0.3)
        expected.append(model.predict_ms(load))
    assert max(expected[100:]) < 0.6


def test_slow_steps_are_answered_at_once() -> None:
    """As on a machine whose neighbours work for a moment."""
    model = CostModel(LIMIT_MS)
    serve(model, Machine(10.0, 0.1, 0.5, 1e-6), decodes=4, prompts=[2000] * 4)
    times, _ = serve(model, Machine(15.0, 0.15, 0.75, 1.5e-6), decodes=4, prompts=[2000])
    assert times[0] > 1.4 * LIMIT_MS
    assert max(times[1:]) <= 1.1 * LIMIT_MS
    times, _ = serve(model, Machine(10.0, 0.1, 0.5, 1e-6), decodes=4, prompts=[2000] * 4)
    assert min(times[6:10]) >= 0.8 * LIMIT_MS


def test_what_a_row_costs_is_learned_from_few_steps() -> None:
    """The number of sequences stays the same, and then they have draft tokens."""
    model, machine = CostModel(LIMIT_MS), Machine(0.5, 1.5, 0.0, 0.0)
    assert not model.knows_decodes
    for load in (StepLoad(4, 40), StepLoad(36, 360), StepLoad(36, 400), StepLoad(36, 440)):
        model.observe(load, machine.exact(load))
    assert model.knows_decodes
    assert model.draft_ms(100, 1) == pytest.approx(machine.decode, rel=0.2)
