"""Blocks on disk change no token: sequences go on from them after restarts, in caches and folders of any size."""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine.driving import Driver, Job, alone, random_clock
from engine.fake_executor import FakeExecutor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidewheel.engine.cache.identity import Identity
from tidewheel.engine.cache.tiers.disk import TierStats
from tidewheel.engine.cache.tiers.folder import BlockFolder
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams

BLOCK, MAX_LENGTH = 4, 48  # tokens
EOS = frozenset({0, 7})
ROOMY = ExecutorLimits(BLOCK, 64, 8, 64)
MODEL = b"m" * 16
FILE = 4096  # bytes that a block takes on disk


def opened(path: Path, space: int = 1 << 30, kind: type[BlockFolder] = BlockFolder) -> BlockFolder:
    folder = kind(str(path), MODEL, space)
    folder.scan()
    return folder


def job(length: int, max_tokens: int = 3, *, first: int = 1, salt: str | None = None, n: int = 1) -> Job:
    prompt = tuple((first + i) % 200 for i in range(length))
    return Job(prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True), cache_salt=salt)


def driver(folder: BlockFolder, limits: ExecutorLimits = ROOMY) -> Driver:
    return Driver(FakeExecutor(limits), MAX_LENGTH, limits=limits, kv_folder=folder)


def run(serving: Driver, *jobs: Job) -> list[int]:
    """Serve jobs one after another, and check their tokens; how many tokens of each prompt were cached."""
    cached = []
    for wanted in jobs:
        before = serving.scheduler.cached_prompt_tokens_total
        for index, key in enumerate(serving.add(wanted)):
            expected, _ = alone(FakeExecutor(ROOMY), MAX_LENGTH, wanted, index, frozenset())
            serving.run()
            assert serving.sampled[key] == expected
        cached.append(serving.scheduler.cached_prompt_tokens_total - before)
    return cached


def tier_stats(serving: Driver) -> TierStats:
    assert serving.scheduler.offload is not None
    return serving.scheduler.offload.stats().tier


def test_a_prompt_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = driver(opened(tmp_path))
    assert run(first, job(30)) == [0]
    first.close()
    again = driver(opened(tmp_path))
    assert run(again, job(30), job(30), job(9)) == [28, 28, 8]
    stats = tier_stats(again)
    assert (stats.blocks_read, stats.blocks_bad, stats.bytes_read) == (7, 0, 7 * 2 * BLOCK * 4)
    again.close()


def test_the_next_turn_finds_the_answer_too(tmp_path: Path) -> None:
    first = driver(opened(tmp_path))
    (key,) = first.add(job(18, 10))
    first.run()
    answer = first.tokens(key)
    first.close()
    following = Job((*job(18).prompt, *answer, 9, 9, 9), SamplingParams(max_tokens=2, ignore_eos=True))
    again = driver(opened(tmp_path))
    assert run(again, following) == [24]  # the last token of the answer was never computed
    again.close()


def test_what_memory_has_no_room_for_comes_back(tmp_path: Path) -> None:
    tiny = replace(ROOMY, num_blocks=10)
    serving = driver(opened(tmp_path), tiny)
    assert run(serving, job(36), job(36, first=50), job(36), job(36, first=50)) == [0, 0, 32, 32]
    serving.close()


def test_salts_share_no_block_on_disk(tmp_path: Path) -> None:
    first = driver(opened(tmp_path))
    run(first, job(30, salt="mine"))
    first.close()
    again = driver(opened(tmp_path))
    assert run(again, job(30), job(30, salt="yours"), job(30, salt="mine")) == [0, 0, 28]
    again.close()


def test_choices_go_on_from_one_prompt(tmp_path: Path) -> None:
    first = driver(opened(tmp_path))
    run(first, job(30))
    first.close()
    again = driver(opened(tmp_path))
    assert run(again, job(30, n=3)) == [28]
    again.close()


def test_forgotten_prompts_are_gone_from_disk_too(tmp_path: Path) -> None:
    serving = driver(opened(tmp_path))
    run(serving, job(30))
    assert serving.scheduler.offload is not None
    serving.scheduler.offload.forget()
    assert run(serving, job(30, first=90), job(30)) == [0, 0]
    serving.close()
    again = driver(opened(tmp_path))
    assert run(again, job(30)) == [28], "what came later is kept"
    again.close()


def test_a_damaged_block_ends_what_is_found(tmp_path: Path) -> None:
    first = driver(opened(tmp_path))
    run(first, job(30))
    first.close()
    digest, tokens = Identity().root, np.array(job(30).prompt, np.int32)
    for block in range(4):
        digest = Identity().block_digest(digest, block * BLOCK, tokens[block * BLOCK : (block + 1) * BLOCK])
    (fourth,) = tmp_path.glob(f"*/{digest.hex()}.kv")
    content = bytearray(fourth.read_bytes())
    content[-1] ^= 1
    fourth.write_bytes(content)
    again = driver(opened(tmp_path))
    assert run(again, job(30)) == [12]
    assert tier_stats(again).blocks_bad == 1
    assert run(again, job(30)) == [28]
    again.close()
    healed = driver(opened(tmp_path))
    assert run(healed, job(30)) == [28]
    healed.close()


class Held(BlockFolder):
    """Reads nothing before it is let go."""

    may_read = threading.Event()

    def read(self, digest: bytes, data: NDArray[np.uint8]) -> bool:
        assert self.may_read.wait(30)
        return super().read(digest, data)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[BlockFolder]:
    first = driver(opened(tmp_path))
    run(first, job(30))
    first.close()
    Held.may_read.clear()
    yield opened(tmp_path, kind=Held)
    Held.may_read.set()


def test_others_run_while_a_prompt_is_read(held: BlockFolder) -> None:
    serving = driver(held)
    (other,) = serving.add(job(5, 20, first=100))
    serving.step()
    (waiting,) = serving.add(job(30))
    late = [serving.add(job(6, 2, first=first))[0] for first in (120, 130)]
    for _ in range(10):
        serving.step()
    assert set(late) <= set(serving.finished)
    assert (len(serving.tokens(other)), serving.tokens(waiting), serving.scheduler.num_deferred) == (11, [], 1)
    Held.may_read.set()
    serving.run()
    assert serving.finished[waiting].reason is FinishReason.LENGTH
    assert tier_stats(serving).blocks_read == 7
    serving.close()


def test_who_shares_the_prefix_waits_for_the_same_reading(held: BlockFolder) -> None:
    serving = driver(held)
    serving.add(job(5, 4, first=100))
    keys = [serving.add(job(30))[0] for _ in range(3)]
    serving.step()
    assert serving.scheduler.num_deferred == 3
    Held.may_read.set()
    serving.run()
    assert tier_stats(serving).blocks_read == 7
    assert len({tuple(serving.tokens(key)) for key in keys}) == 1
    serving.close()


@pytest.mark.parametrize("stopping", [False, True])
def test_nothing_is_left_of_a_prompt_that_is_aborted_while_it_is_read(held: BlockFolder, stopping: bool) -> None:
    serving = driver(held)
    (other,) = serving.add(job(5, 6, first=100))
    (waiting,) = serving.add(job(30))
    serving.step()
    if not stopping:
        serving.abort(waiting)
        serving.run()
        assert serving.finished[other].reason is FinishReason.LENGTH
        assert serving.cache.num_used == 0
    Held.may_read.set()
    serving.close()
    assert serving.finished[waiting].reason is FinishReason.ABORT
    assert serving.cache.num_used == 0


def test_reading_that_takes_longer_than_computing_is_given_up(held: BlockFolder) -> None:
    serving = driver(held)
    for first in range(100, 120):  # from which the cost model learns that steps are short
        run(serving, job(9, 1, first=first))
    assert run(serving, job(30)) == [0]
    Held.may_read.set()
    serving.close()


class Full(BlockFolder):
    """A disk that is full after two blocks."""

    num_written = 0

    def write(self, digest: bytes, data: NDArray[np.uint8]) -> None:
        if self.num_written == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.num_written += 1
        super().write(digest, data)


class Unreadable(BlockFolder):
    """A disk that has failed."""

    def read(self, digest: bytes, data: NDArray[np.uint8]) -> bool:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(("kind", "cause"), [(Full, "No space left"), (Unreadable, "Input/output error")])
def test_a_disk_that_fails_is_reported_once_and_requests_go_on(
    tmp_path: Path, kind: type[BlockFolder], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = driver(opened(tmp_path))
    run(first, job(12))
    first.close()
    serving = driver(opened(tmp_path, kind=kind), replace(ROOMY, num_blocks=12))
    run(serving, *(job(length, first=first) for first in (1, 50, 100, 150) for length in (12, 30)))
    serving.close()
    assert [message for message in caplog.messages if cause in message] == [
        f"--kv-offload is off from now on, and requests go on without it: {_strerror(cause)} in {tmp_path}; free "
        "disk space or repair the folder, and restart the server"
    ]
    assert not tier_stats(serving).is_on
    opened(tmp_path).close()  # it was given back


def _strerror(cause: str) -> str:
    return "No space left on device" if cause.startswith("No") else cause


class Slow(BlockFolder):
    """A disk that has not written its first block when the second is there."""

    may_write = threading.Event()

    def write(self, digest: bytes, data: NDArray[np.uint8]) -> None:
        assert self.may_write.wait(30)
        super().write(digest, data)


def test_blocks_that_a_slow_disk_has_no_time_for_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.may_write.clear()
    monkeypatch.setattr("tidewheel.engine.cache.tiers.disk._QUEUED_BYTES", 3 * 2 * BLOCK * 4)
    serving = driver(opened(tmp_path, kind=Slow), replace(ROOMY, num_blocks=12))
    run(serving, *(job(30, first=first) for first in (1, 50, 100)))
    dropped = tier_stats(serving).blocks_dropped
    Slow.may_write.set()
    serving.close()
    stats = tier_stats(serving)
    assert dropped >= 8
    assert stats.blocks_written + stats.blocks_dropped == 3 * 8
    assert len(list(tmp_path.glob("*/*.kv"))) == stats.blocks_written >= 3


jobs = st.builds(
    lambda stem, tail, max_tokens, n, seed, scored, salt: Job(
        (*range(stem), *tail),
        SamplingParams(max_tokens=max_tokens, temperature=1.0, n=n, ignore_eos=True, prompt_logprobs=scored),
        seed,
        cache_salt=salt,
    ),
    st.integers(0, 30),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.sampled_from([1, 2, 5, 9]),
    st.sampled_from([1, 1, 2]),
    st.integers(0, 3),
    st.sampled_from([None, None, None, 0]),
    st.sampled_from([None, None, None, "mine"]),
)
lives = st.lists(  # of a server, with the moments of each
    st.lists(st.tuples(st.lists(jobs, max_size=2), st.lists(st.integers(0, 9), max_size=1)), min_size=1, max_size=4),
    min_size=2,
    max_size=3,
)


def check_lives(
    moments_of_lives: list[list[tuple[list[Job], list[int]]]],
    make: Callable[[], FakeExecutor],
    limits: ExecutorLimits,
    space: int,
    seed: int,
) -> None:
    """Fails unless every request of several servers, one after another, samples what it samples alone."""
    with tempfile.TemporaryDirectory() as path:
        for moments in moments_of_lives:
            serving = Driver(
                make(), MAX_LENGTH, EOS, clock=random_clock(seed), limits=limits, kv_folder=opened(Path(path), space)
            )
            expected = {}
            for arriving, aborted in moments:
                for new in arriving:
                    for index, key in enumerate(serving.add(new)):
                        expected[key] = alone(FakeExecutor(ROOMY), MAX_LENGTH, new, index, EOS)
                for number in aborted:
                    serving.abort(number)
                serving.step()
            if seed % 3:
                serving.run()
            serving.close()
            for key, (sampled, scored) in expected.items():
                if serving.finished[key].reason is FinishReason.ABORT:
                    sampled, scored = sampled[: len(serving.sampled[key])], scored[: len(serving.scored[key])]
                assert (serving.sampled[key], serving.scored[key]) == (sampled, scored)
            held = sum(1 for _ in Path(path).glob("*/*.kv"))
            assert held * FILE <= space


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lives, st.integers(12, 24), st.integers(1, 6), st.sampled_from([3, 17, 64]), st.integers(1, 40), st.integers(0, 99)
)
def test_servers_that_share_a_folder_sample_what_requests_sample_alone(
    moments: list[list[tuple[list[Job], list[int]]]],
    num_blocks: int,
    num_seqs: int,
    num_tokens: int,
    space: int,
    seed: int,
) -> None:
    limits = ExecutorLimits(BLOCK, num_blocks, num_seqs, num_tokens)
    check_lives(moments, lambda: FakeExecutor(limits), limits, space * FILE, seed)
