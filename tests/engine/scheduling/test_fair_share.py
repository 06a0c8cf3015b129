"""Clients take turns within a priority: none delays another for long, nothing starves, and no token changes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from engine.driving import METHODS, Driver, Job, Oracle, check_schedule, drafter_of, random_clock
from engine.fake_executor import FakeExecutor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.limits import CacheGroup, ExecutorLimits, StepShape
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.fair_share import MAX_SHARING, FairShares
from tidewheel.engine.scheduling.waiting import WaitingQueue
from tidewheel.engine.sequences.sequence import Sequence

BLOCK = 4
EOS = frozenset({0, 7})
MAX_LENGTH = 32  # tokens
ROOMY = ExecutorLimits(BLOCK, 64, 8, 64)
STEP = 16  # tokens of the steps below
LARGE = ExecutorLimits(BLOCK, 4096, 64, STEP)


def job(length: int, max_tokens: int = 1, *, client: str, first: int = 1, priority: int = 0, n: int = 1) -> Job:
    prompt = tuple((first * 7 + i * i) % 256 for i in range(length))
    return Job(prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True), priority=priority, client=client)


def large(**options: object) -> Driver:
    return Driver(FakeExecutor(dataclasses.replace(LARGE, **options)), 4096)  # type: ignore[arg-type]


def ends(driver: Driver, names: dict[int, str]) -> str:
    """Whose sequences have ended, in order, once nothing is left."""
    driver.run()
    return "".join(names[key] for key in driver.finished)


# Prompts of few kinds, so that they often share prefixes.
jobs = st.builds(
    lambda stem, tail, tokens, n, scored, seed, priority, salt, client: Job(
        (*range(stem), *tail),
        SamplingParams(max_tokens=tokens, n=n, prompt_logprobs=scored),
        seed,
        priority,
        salt,
        client=client,
    ),
    st.integers(0, 18),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.sampled_from([None, 0, 1, 2, 5, 9]),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.sampled_from([None, None, None, 0]),
    st.integers(0, 3),
    st.sampled_from([0, 0, 0, -1, 5]),
    st.sampled_from([None, None, "a"]),
    st.sampled_from("abc"),
)


@st.composite
def executor_limits(draw: st.DrawFn) -> ExecutorLimits:
    num_blocks, max_num_seqs = draw(st.integers(8, 24)), draw(st.integers(1, 6))
    limits = ExecutorLimits(
        BLOCK, num_blocks, max_num_seqs, draw(st.sampled_from([1, 3, 6, 17, 64])), mixed_steps=draw(st.booleans())
    )
    kind = draw(st.sampled_from(["plain", "stages", "whole", "shapes", "window", "states"]))
    if kind == "stages":
        return dataclasses.replace(limits, mixed_steps=True, pipeline_stages=draw(st.integers(2, 4)))
    if kind == "whole":
        return dataclasses.replace(limits, chunked_prefill=False, max_num_batched_tokens=40)
    if kind == "shapes":
        shapes = tuple(StepShape(count, length) for count in (1, 2, 4) for length in (1, 8, 16) if count * length <= 40)
        most = draw(st.sampled_from([None, 1, 2]))
        return dataclasses.replace(
            limits, mixed_steps=False, max_num_batched_tokens=40, max_prefill_seqs=most, shapes=shapes
        )
    if kind == "window":
        groups = (CacheGroup(draw(st.integers(4, 12)), window=draw(st.sampled_from([3, 6, 11]))),)
        stages = draw(st.sampled_from([1, 1, 3]))
        return dataclasses.replace(limits, mixed_steps=stages > 1, pipeline_stages=stages, window_groups=groups)
    if kind == "states":
        return dataclasses.replace(limits, num_states=max_num_seqs + draw(st.integers(0, 6)))
    return limits


moments = st.lists(st.tuples(st.lists(jobs, max_size=3), st.lists(st.integers(0, 99), max_size=1)), max_size=8)


# Each example computes each of its requests alone too.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(executor_limits(), moments, st.booleans(), st.integers(0, 1000), METHODS)
def test_whoever_else_is_served_a_request_samples_what_it_samples_alone(
    limits: ExecutorLimits,
    arrivals: list[tuple[list[Job], list[int]]],
    prefix_caching: bool,
    seed: int,
    method: str | None,
) -> None:
    oracle = Oracle(seed)
    drafter = None if limits.draft_limit == 0 else drafter_of(method, oracle)
    driver = Driver(FakeExecutor(limits), MAX_LENGTH, EOS, prefix_caching, random_clock(seed), drafter=drafter)
    groups = tuple(CacheGroup(64, group.window) for group in limits.window_groups)
    roomy = dataclasses.replace(ROOMY, window_groups=groups, num_states=8 if limits.num_states else 0)
    check_schedule(driver, arrivals, lambda: FakeExecutor(roomy), oracle)


def test_a_short_request_does_not_wait_for_the_many_of_another_client() -> None:
    driver = large()
    heavy = [driver.add(job(100, 10, client="a", first=i))[0] for i in range(30)]
    driver.step()
    (short,) = driver.add(job(10, client="b", first=99))
    driver.step()
    assert short in driver.finished
    assert not any(driver.tokens(key) for key in heavy)
    driver.run()
    assert list(driver.finished)[1:] == heavy


def test_prompts_of_equal_length_are_computed_one_after_the_other() -> None:
    driver = large()
    keys = [driver.add(job(100, client=str(i), first=i))[0] for i in range(8)]
    driver.run()
    chunks = [chunk.sequence.key for step in driver.steps for chunk in step.rows.chunks]
    assert chunks == sorted(chunks)
    assert list(driver.finished) == keys


def test_clients_with_equal_requests_take_turns() -> None:
    driver = large(max_num_seqs=1)
    names = {driver.add(job(20, 20, client=client, first=i))[0]: client for i, client in enumerate("aaaaabbbcc")}
    assert ends(driver, names) == "abcabcabaa"


def test_long_answers_count() -> None:
    driver = large(max_num_seqs=1)
    names = {driver.add(job(20, 60, client="a", first=i))[0]: "a" for i in range(3)}
    names |= {driver.add(job(20, 1, client="b", first=9 + i))[0]: "b" for i in range(8)}
    assert ends(driver, names) == "abbbbabbbba"[: len(names)]


def test_priorities_come_before_turns() -> None:
    driver = large(max_num_seqs=1)
    names = {
        driver.add(job(20, client=client, first=i, priority=priority))[0]: f"{client}{priority}"
        for i, (client, priority) in enumerate([("a", 1), ("a", 0), ("a", 0), ("b", 1), ("b", 1), ("a", 1), ("a", 0)])
    }
    # What a client was served at one priority does not count at another.
    assert ends(driver, names) == "a0a0a0a1b1b1a1"


def test_what_goes_before_a_prompt_of_its_own_client_lends_it_its_priority() -> None:
    driver = large(max_num_seqs=3)
    (begun,) = driver.add(job(100, client="a", priority=5))
    driver.step()
    (urgent,) = driver.add(job(20, client="a", first=2))
    others = [driver.add(job(100, client="b", first=3 + i))[0] for i in range(3)]
    driver.run()
    assert list(driver.finished) == [begun, urgent, *others]


def test_what_is_cached_does_not_count() -> None:
    driver = large()
    known = job(120, client="a")
    driver.add(known)
    driver.run()
    (running,) = driver.add(job(100, client="c", first=5))
    driver.step()
    other = driver.add(job(40, client="b", first=2))[0]
    again = driver.add(known)[0]
    driver.run()
    assert list(driver.finished)[1:] == [again, other, running]


def test_a_prompt_goes_on_for_the_sake_of_who_waits_for_its_prefix() -> None:
    driver = large()
    stem = job(32, client="a").prompt
    long = Job(stem + job(400, client="a", first=3).prompt, SamplingParams(max_tokens=1), client="a")
    (maker,) = driver.add(long)
    driver.step()
    waiting = driver.add(dataclasses.replace(long, prompt=(*stem, 1, 2), client="b"))[0]
    others = [driver.add(job(100, client="c", first=5 + i))[0] for i in range(3)]
    driver.run()
    assert list(driver.finished) == [waiting, *others, maker]


def test_new_clients_do_not_keep_a_long_prompt_waiting_for_ever() -> None:
    driver, length, overload = large(), 3 * STEP, 2
    (long,) = driver.add(job(length, client="old"))
    num_steps = 0
    while long not in driver.finished:
        for i in range(overload):
            driver.add(job(STEP, client=f"new {num_steps} {i}", first=overload * num_steps + i))
        driver.step()
        num_steps += 1
        assert num_steps <= overload * MAX_SHARING * (length / STEP + 1)
    assert num_steps > length / STEP + 1, "nobody has passed it"


def test_a_client_that_comes_is_not_served_for_what_it_has_missed() -> None:
    driver = large()
    idle = driver.add(job(4, 4000, client="idle"))[0]  # holds its place with an answer
    for i in range(20):
        driver.add(job(100, client="busy", first=i))
    while driver.scheduler.num_waiting:
        driver.step()
    names = dict.fromkeys([driver.add(job(100, client="busy", first=30 + i))[0] for i in range(4)], "b")
    names |= dict.fromkeys([driver.add(job(100, client="idle", first=50 + i))[0] for i in range(4)], "i")
    while len(names.keys() & driver.finished.keys()) < 8:
        driver.step()
    order = "".join(names[key] for key in driver.finished if key in names)
    assert Counter(order[:4]) == Counter(order[4:]) == {"b": 2, "i": 2}
    assert idle not in driver.finished


lengths = st.lists(st.integers(1, 60), min_size=8, max_size=8)


@settings(max_examples=10, deadline=None)
@given(lengths, lengths, st.integers(1, 6), st.integers(1, 4))
def test_clients_with_a_queue_are_served_alike(first: list[int], second: list[int], answer: int, slots: int) -> None:
    """Their tokens differ by no more than the longest prompt, and an answer for each sequence that runs."""
    driver = large(max_num_seqs=slots)
    clients: dict[int, str] = {}
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        clients[driver.add(job(a, answer, client="a", first=2 * i))[0]] = "a"
        clients[driver.add(job(b, answer, client="b", first=2 * i + 1))[0]] = "b"
    waiting = Counter(clients.values())
    served = Counter(a=0, b=0)
    begun: set[int] = set()
    while driver.scheduler.has_work:
        step = driver.step()
        assert step is not None
        for chunk in step.rows.chunks:
            served[clients[chunk.sequence.key]] += chunk.num_tokens
            if chunk.sequence.key not in begun:
                waiting[clients[chunk.sequence.key]] -= 1
                begun.add(chunk.sequence.key)
        served.update(clients[sequence.key] for sequence in step.rows.decodes)
        if not min(waiting["a"], waiting["b"]):
            break
        assert abs(served["a"] - served["b"]) <= max(first + second) + STEP + slots * answer


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=12), st.integers(1, 4))
def test_each_client_is_served_first_come_first_served(arrivals: list[tuple[str, int]], slots: int) -> None:
    driver = large(max_num_seqs=slots)
    clients = {}
    for i, (client, length) in enumerate(arrivals):
        clients[driver.add(job(length, 3, client=client, first=i))[0]] = client
        driver.step()
    driver.run()
    for name in "abc":
        begun = [c.sequence.key for step in driver.steps for c in step.rows.chunks if clients[c.sequence.key] == name]
        assert begun == sorted(begun)


@pytest.mark.parametrize("window", [None, 6])
def test_two_long_prompts_that_fill_the_cache_both_end(window: int | None) -> None:
    """Whichever goes first has the blocks that it needs, also if its client's turn is later."""
    groups = () if window is None else (CacheGroup(6, window),)
    limits = ExecutorLimits(BLOCK, 24, 4, 8, mixed_steps=window is None, window_groups=groups)
    driver = Driver(FakeExecutor(limits), 64)
    names = {}
    for i, length in enumerate([40, 9, 30, 8, 20, 7, 40]):
        names[driver.add(job(length, 12, client=f"{i % 3}", first=i))[0]] = i
        driver.step()
    driver.run()
    assert {len(driver.tokens(key)) for key in names} == {12}


def test_a_preempted_sequence_goes_on_before_the_prompts_of_others() -> None:
    driver = Driver(FakeExecutor(ExecutorLimits(BLOCK, 12, 8, 64)), 40)
    old, young = (driver.add(job(14, 24, client=client, first=i))[0] for i, client in enumerate("ab"))
    waiting = driver.add(job(14, 24, client="c", first=7))[0]
    driver.run()
    assert driver.scheduler.preemptions_total >= 1
    assert list(driver.finished) == [old, young, waiting]


def queue_of(lengths: list[int], looked_at: list[int]) -> tuple[WaitingQueue, FairShares]:
    """A queue with a waiting client for each length. It notes which of them are looked up in the cache."""

    def num_cached(sequence: Sequence) -> int:
        looked_at.append(sequence.key)
        return 0

    shares = FairShares()
    queue = WaitingQueue(shares, num_cached)
    for key, length in enumerate(lengths):
        prompt, client = np.zeros(length, np.int32), str(key)
        sequence = Sequence(key, prompt, SamplingParams(), seed=0, arrival=key, client=client, max_length=2 * length)
        shares.add(sequence, 1, nobody_waits=False)
        queue.push(sequence)
    return queue, shares


def test_a_queue_of_many_clients_looks_at_each_of_them_once() -> None:
    looked_at: list[int] = []
    queue, shares = queue_of([1 + i * 37 % 50 for i in range(2000)], looked_at)
    taken = []
    while (first := queue.peek()) is not None:
        taken.append(queue.pop())
        assert taken[-1] is first
        shares.admit(first, first.prompt_len)
    assert [s.key for s in taken] == [s.key for s in sorted(taken, key=lambda s: (s.prompt_len, s.key))]
    assert len(looked_at) == 2000


def test_a_choice_looks_at_no_more_clients_than_it_has_time_for() -> None:
    looked_at: list[int] = []
    queue, _ = queue_of([20_000] * 20, looked_at)
    taken = []
    while (first := queue.peek()) is not None:
        assert len(looked_at) <= 4 * (len(taken) + 1)
        taken.append(queue.pop())
        assert taken[-1] is first
    assert [sequence.key for sequence in taken] == list(range(20))
