"""EncoderWork: batches run in pieces, and a short request goes between those of a longer batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import cast

import numpy as np
import pytest

from tidewheel.engine.encoders.batching import SHORT_TOKENS, Job
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.pooling import Floats
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.encoders.work import EncoderWork

BROKEN, NOT_FINITE = 11, 12
PIECE_TOKENS = 32


class Pieces:
    """An encoder whose result is an input's first token. It notes the tokens of each batch whose piece it runs."""

    takes_batches = True
    pads = False
    tasks = frozenset({"embed"})

    def __init__(self) -> None:
        self.trace: list[int] = []
        self.is_within_layer = False
        self.piece_s: list[float] = []

    def set_piece(self, seconds: float) -> None:
        self.piece_s.append(seconds)

    def pieces(self, task: Task, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[Floats]]:
        tokens = sum(map(len, inputs))
        if any(BROKEN in item.token_ids for item in inputs):
            raise RuntimeError("a broken token")
        for _ in range(-(-tokens // PIECE_TOKENS)):
            self.trace.append(tokens)
            yield
        firsts = [item.token_ids[0] for item in inputs]
        return [np.full(1, np.nan if first == NOT_FINITE else first, np.float32) for first in firsts]


class Driver:
    """An EncoderWork with one encoder, and the jobs that it has finished."""

    def __init__(self) -> None:
        self.fake = Pieces()
        self.encoder = cast("Encoder", self.fake)
        self.ended: list[Job] = []
        self.failure: BaseException | None = None
        self.work = EncoderWork([self.encoder], self.deliver)

    def deliver(self, ended: list[Job], failure: BaseException | None) -> None:
        self.ended += ended
        self.failure = failure

    def add(self, *inputs: tuple[int, int], client: str = "") -> Job:
        """A job of such tokens, each as often."""
        job = Job(self.encoder, "embed", [EncoderInput([token] * count) for token, count in inputs], client)
        self.work.add(job)
        return job

    def run(self, pieces: int = 10_000) -> None:
        for _ in range(pieces):
            if not self.work.run_piece(0.02, nothing_runs=False):
                break


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_each_call_runs_a_piece_until_all_are_done(driver: Driver) -> None:
    job = driver.add((20, 100), (21, 40))
    for done in range(1, 6):
        assert driver.work.is_waiting
        assert driver.work.run_piece(0.02, nothing_runs=False)
        assert len(driver.fake.trace) == done
        assert not driver.ended
    driver.run()
    assert not driver.work.is_waiting
    assert not driver.work.run_piece(0.02, nothing_runs=False)
    assert (driver.ended, [int(result[0]) for result in job.results]) == ([job], [20, 21])
    counts = driver.work.counts[driver.encoder]
    assert (counts.batches, counts.tokens, counts.padding) == (1, 140, 0)
    assert set(driver.fake.piece_s) == {0.02}


def test_a_short_request_goes_between_the_pieces_of_a_long_batch(driver: Driver) -> None:
    long = driver.add((20, 1000))
    driver.run(3)
    short = driver.add((30, 12))
    driver.run(2)
    assert driver.ended == [short]
    assert driver.fake.trace == [1000, 1000, 1000, 12]
    driver.run()
    assert driver.ended == [short, long]
    assert driver.fake.trace.count(1000) == 32  # nothing was computed twice


def test_many_short_requests_do_not_keep_a_long_one_from_going_on(driver: Driver) -> None:
    driver.add((20, 10 * PIECE_TOKENS))
    driver.run(1)
    for client in range(40):
        driver.add((30, SHORT_TOKENS), client=str(client))
    driver.run(60)
    assert driver.fake.trace.count(10 * PIECE_TOKENS) == 10


def test_a_request_of_many_short_texts_waits_for_its_turn(driver: Driver) -> None:
    long = driver.add((20, 1000))
    driver.run(1)
    many = driver.add(*[(30, 12)] * 10)
    driver.run()
    assert driver.ended == [long, many]


def test_within_a_layer_nothing_else_is_run(driver: Driver) -> None:
    driver.add((20, 1000))
    driver.run(1)
    driver.add((30, 12))
    driver.fake.is_within_layer = True
    driver.run(3)
    assert driver.fake.trace == [1000] * 4
    driver.fake.is_within_layer = False
    driver.run(1)
    assert driver.fake.trace[-1] == 12


def test_an_input_that_fails_takes_no_other_request_with_it(driver: Driver) -> None:
    jobs = [driver.add((token, 30)) for token in (20, BROKEN, 21, NOT_FINITE)]
    driver.run()
    good, broken, also_good, not_finite = jobs
    assert {*driver.ended} == {*jobs}
    assert len(driver.ended) == 4
    assert (good.failure, also_good.failure, int(also_good.results[0][0])) == (None, None, 21)
    assert "a broken token" in str(broken.failure)
    assert "not finite" in str(not_finite.failure)


def test_an_aborted_request_is_left_in_the_middle(driver: Driver) -> None:
    gone = driver.add((20, 1000), (21, 1000))
    driver.run(3)
    stays = driver.add((22, 70))
    driver.work.abort(gone)
    driver.run()
    assert driver.ended == [stays]
    assert driver.fake.trace == [1000] * 3 + [70] * 3


def test_a_dead_thread_is_told_and_leaves_nothing(driver: Driver) -> None:
    driver.add((20, 1000))
    driver.run(1)
    death = MemoryError()
    driver.work.close(death)
    assert driver.failure is death
    assert not driver.work.is_waiting
