"""Which inputs run together: there is little padding, and no input is lost or left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.encoders.batching import MAX_BATCH_TOKENS, BatchQueue, Item, Job, choose_batch
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=40)
TASKS: tuple[Task, ...] = ("embed", "token_embed")


class FakeEncoder:
    tasks = frozenset(TASKS)

    def __init__(self, takes_batches: bool = True, pads: bool = True) -> None:
        self.takes_batches, self.pads = takes_batches, pads


def job(encoder: FakeEncoder, lengths: Sequence[int], client: str = "", task: Task = "embed") -> Job:
    return Job(cast(Encoder, encoder), task, [EncoderInput([0] * length) for length in lengths], client)


def drain(queue: BatchQueue) -> list[list[Item]]:
    batches = []
    while batch := queue.next_batch():
        batches.append(batch)
    assert not queue
    return batches


@given(LENGTHS, st.data(), st.sampled_from([64, 512, 1024]))
def test_a_batch_holds_its_anchor_and_its_bounds(lengths: list[int], data: Any, max_tokens: int) -> None:
    lengths.sort()
    anchor = data.draw(st.integers(0, len(lengths) - 1))
    start, end = choose_batch(lengths, anchor, max_tokens)
    assert 0 <= start <= anchor < end <= len(lengths)
    real, padded = sum(lengths[start:end]), (end - start) * lengths[end - 1]
    if end - start > 1:
        assert padded <= max_tokens
        assert padded - real <= max(16, real / 20)


def test_equal_lengths_fill_a_batch() -> None:
    assert choose_batch([64] * 100, 50, 1024)[1] - choose_batch([64] * 100, 50, 1024)[0] == 16


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(TASKS), LENGTHS), max_size=6))
def test_every_input_runs_once_and_batches_are_of_one_encoder_and_task(
    jobs: list[tuple[int, Task, list[int]]],
) -> None:
    encoders, queue = [FakeEncoder(), FakeEncoder()], BatchQueue()
    added = [job(encoders[which], lengths, task=task) for which, task, lengths in jobs]
    for one in added:
        queue.add(one)
    waiting = sum(queue.num_waiting(cast(Encoder, encoder)) for encoder in encoders)
    assert waiting == sum(len(one.inputs) for one in added)
    batches = drain(queue)
    seen = sorted((added.index(item.job), item.index) for batch in batches for item in batch)
    assert seen == [(i, j) for i, one in enumerate(added) for j in range(len(one.inputs))]
    for batch in batches:
        assert len({(id(item.job.encoder), item.job.task) for item in batch}) == 1
        assert len(batch) == 1 or len(batch) * max(item.length for item in batch) <= MAX_BATCH_TOKENS


def test_without_padding_texts_of_any_lengths_fill_a_batch() -> None:
    queue = BatchQueue()
    queue.add(job(FakeEncoder(pads=False), [1000, 3, 20, 600, 400]))
    assert [sorted(item.length for item in batch) for batch in drain(queue)] == [[1000], [3, 20, 400, 600]]


def test_an_encoder_without_batches_runs_inputs_alone() -> None:
    queue = BatchQueue()
    queue.add(job(FakeEncoder(takes_batches=False), [5] * 7))
    assert [len(batch) for batch in drain(queue)] == [1] * 7


def test_a_small_job_does_not_wait_for_a_large_one() -> None:
    encoder, queue = FakeEncoder(), BatchQueue()
    queue.add(job(encoder, [500] * 200))
    queue.next_batch()
    small = job(encoder, [20, 30])
    queue.add(small)
    early = [item for _ in range(3) for item in queue.next_batch()]
    assert sum(item.job is small for item in early) == 2


@given(st.lists(LENGTHS, min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 3))
def test_a_removed_job_leaves_nothing_behind(jobs: list[list[int]], which: int, batches_before: int) -> None:
    encoder, queue = FakeEncoder(), BatchQueue()
    added = [job(encoder, lengths) for lengths in jobs]
    for one in added:
        queue.add(one)
    taken = [item for _ in range(batches_before) for item in queue.next_batch()]
    gone = added[which % len(added)]
    queue.remove(gone)
    queue.remove(gone)  # a second time changes nothing
    left = [item for batch in drain(queue) for item in batch]
    assert all(item.job is not gone for item in left)
    others = sum(len(one.inputs) for one in added if one is not gone)
    assert len(left) + sum(item.job is not gone for item in taken) == others
    assert queue.num_waiting(cast(Encoder, encoder)) == 0


def test_a_client_does_not_wait_for_the_jobs_of_another() -> None:
    encoder, queue = FakeEncoder(), BatchQueue()
    flood = [job(encoder, [500] * 4, "a") for _ in range(50)]
    for one in flood:
        queue.add(one)
    small = [job(encoder, [20], "b"), job(encoder, [90], "b")]
    for one in small:
        queue.add(one)
    early = [item.job for _ in range(4) for item in queue.next_batch()]
    assert small[0] in early
    assert small[1] in early
    for one in (*flood[:40], *small):
        queue.remove(one)
    left = [item for batch in drain(queue) for item in batch]
    assert {item.job for item in left} == set(flood[40:])


def test_clients_take_turns_in_going_between_pieces() -> None:
    encoder, queue = FakeEncoder(takes_batches=False), BatchQueue()
    flood = [job(encoder, [20], "a") for _ in range(3)]
    small = job(encoder, [20], "b")
    for one in (*flood, small):
        queue.add(one)
    taken = [item.job for _ in range(2) for item in queue.next_short(None)]
    assert taken == [flood[0], small]
    assert {item.job for batch in drain(queue) for item in batch} == set(flood[1:])


def test_a_removed_client_loses_its_place() -> None:
    encoder, queue = FakeEncoder(), BatchQueue()
    one, other = job(encoder, [500], "a"), job(encoder, [20], "b")
    queue.add(one)
    queue.add(other)
    queue.remove(one)
    assert [item.job for batch in drain(queue) for item in batch] == [other]
