"""Drives scheduler, builder and executor without threads, checking the books after every move."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from engine.books import check_scheduler
from engine.tiny_tokenizers import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.cache.tiers.disk import DiskTier
from tidewheel.engine.cache.tiers.folder import BlockFolder
from tidewheel.engine.cache.tiers.offload import Offload
from tidewheel.engine.constraints.constraint import SequenceConstraint, TokenConstraints
from tidewheel.engine.constraints.masks import MaskWriter
from tidewheel.engine.cost_model import CostModel, StepLoad
from tidewheel.engine.devices.batch import StepOutput
from tidewheel.engine.devices.executor import Executor, OnWait, Pending
from tidewheel.engine.devices.limits import ExecutorLimits, StepShape
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.async_scheduling import drop_ended
from tidewheel.engine.scheduling.batch_builder import BatchBuilders
from tidewheel.engine.scheduling.scheduler import Scheduler
from tidewheel.engine.scheduling.step import Finished, Step
from tidewheel.engine.sequences.beam_search import BeamSearch, Hypothesis
from tidewheel.engine.sequences.sequence import Sequence as EngineSequence
from tidewheel.engine.speculation.drafter import BatchDrafter, Draftable, Drafter
from tidewheel.engine.speculation.ngram import NgramDrafter
from tidewheel.engine.speculation.suffix import SuffixDrafter
from tidewheel.engine.speculation.suffix_options import SuffixOptions

Sampled = tuple[int, float | None, bytes]  # token, logprob, most likely tokens
Scored = tuple[int, float, int, bytes]  # position, logprob, rank, most likely tokens before


@dataclass(frozen=True)
class Job:
    """A request as the scheduler's tests know it. `prompt` is at least one token."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    cache_salt: str | None = None
    constraints: TokenConstraints | None = None
    lora: Lora | None = None
    client: str = ""


class Oracle:
    """A drafter that has been told what comes, and is as often wrong, short or silent as right."""

    def __init__(self, seed: int, longest: int = 6) -> None:
        self._rng = random.Random(seed)
        self._longest = longest
        self._coming: dict[int, list[int]] = {}

    def tell(self, key: int, tokens: list[int]) -> None:
        """All tokens that a sequence is going to sample."""
        self._coming[key] = tokens

    def propose(self, sequence: Draftable) -> list[int]:
        start = sequence.num_tokens - sequence.prompt_len
        draft_tokens = self._coming.get(sequence.key, [])[start : start + self._rng.randint(0, self._longest)]
        if draft_tokens and self._rng.random() < 0.5:
            wrong = self._rng.randrange(len(draft_tokens))
            draft_tokens[wrong] = (draft_tokens[wrong] + self._rng.randint(1, 3)) % 32
        return [token for token in draft_tokens if token >= 0] + [self._rng.randrange(32)] * self._rng.randint(0, 1)


STAGES = st.sampled_from([1, 1, 2, 3])  # of a pipeline
METHODS = st.sampled_from([None, "oracle", "ngram", "suffix"])


def drafter_of(method: str | None, oracle: Oracle) -> Drafter | None:
    """What draft tokens by one of METHODS."""
    if method == "ngram":
        return NgramDrafter(num_tokens=6, longest=3, shortest=1)
    if method == "suffix":
        return SuffixDrafter(6, SuffixOptions(max_cached_requests=4, max_spec_factor=4.0))
    return oracle if method == "oracle" else None


@dataclass
class Driver:
    """An engine without threads, streams and text.

    `clock(step)` says how long a step took, in milliseconds. By `seconds`, nothing else takes any time. `limits` may be
    narrower than the executor's own. With a `kv_folder`, which `close` closes, the executor is an Executor.
    One that `is_fresh` has seen no decode yet, so it drafts nothing before the first one.
    """

    executor: Executor
    max_length: int
    eos_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    clock: Callable[[Step], float] = lambda step: 1.0
    limits: ExecutorLimits | None = None
    drafter: Drafter | BatchDrafter | None = None
    max_drafted: int | None = None
    vocab_size: int = 320  # at least the executor's, and just that for beams
    delay_factor: float = 0.0
    is_fresh: bool = False
    seconds: Callable[[], float] = lambda: 0.0  # tells the time of draft tokens, which decides whether they pay
    kv_folder: BlockFolder | None = None  # where blocks are kept when memory has no room for them
    sampled: dict[int, list[Sampled]] = field(default_factory=dict)
    scored: dict[int, list[Scored]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = self.limits = self.limits or self.executor.limits
        self.cost_model = CostModel(max_step_ms=10.0)
        if self.drafter is not None and not self.is_fresh:
            decode = Step(load=StepLoad(1, 10))
            self.cost_model.observe(decode.load, self.clock(decode))
        self.scheduler = Scheduler(
            self.cost_model,
            limits,
            enable_prefix_caching=self.enable_prefix_caching,
            drafter=self.drafter,
            max_drafted=self.max_drafted,
            delay_factor=self.delay_factor,
            clock=self.seconds,
        )
        self.cache = self.scheduler.cache
        self.builder = BatchBuilders(self.executor.limits, self.scheduler.max_in_flight)
        self.masks = MaskWriter(self.vocab_size)
        self._overlapped: tuple[Step, Pending] | None = None
        self.in_flight: deque[tuple[Step, Pending]] = deque()
        self._has_read = threading.Event()
        if self.kv_folder is not None:
            storing = self.executor
            tier = DiskTier(self.kv_folder, storing.block_bytes, self._has_read.set)
            self.scheduler.offload = Offload(
                tier, self.cache, storing, max_step_ms=10.0, computing_ms=self.cost_model.prefill_ms
            )
        self._arrivals = 0
        self._keys = 0

    def add(self, job: Job) -> list[int]:
        """Queue a job's choices; returns their keys."""
        choices = []
        width = job.sampling.beam_width
        search = None if width is None else BeamSearch(job.sampling, self.eos_ids, self.vocab_size)
        constraint = self._constraint(job)
        for index in range(width or job.sampling.n):
            sequence = EngineSequence(
                self._keys,
                np.array(job.prompt, dtype=np.int32),
                job.sampling,
                index=index,
                seed=job.seed,
                arrival=self._arrivals,
                priority=job.priority,
                client=job.client,
                cache_salt=job.cache_salt,
                lora=job.lora,
                eos_ids=self.eos_ids,
                max_length=self.max_length,
                constraint=None if constraint is None else constraint.fresh(),
                search=search,
            )
            self.sampled[self._keys], self.scored[self._keys] = [], []
            choices.append(sequence)
            self._keys += 1
        self.scheduler.add(choices)
        self._arrivals += 1
        check_scheduler(self.scheduler)
        return [sequence.key for sequence in choices]

    def abort(self, key: int) -> None:
        """End a sequence, if it has not ended."""
        for end in self.scheduler.abort(key):
            self.finished[end.key] = end
        check_scheduler(self.scheduler)

    def step(self) -> Step | None:
        """Run one step. A device with `async_scheduling` is given the next one before this is committed, and one with
        stages as many as it has.
        """
        if self.scheduler.max_in_flight > 1:
            begun = self._begin_many()
        else:
            begun = self._overlapped or self._begin()
        if begun is None:
            return None
        step, pending = begun
        following = self.scheduler.schedule_async(step)
        self._overlapped = None if following is None else (following, self._start(following))
        output = pending.wait()
        if step.is_async:
            output = drop_ended(step, output)
        self._record(step, output)
        adapters = {sequence.adapter for sequence in step.rows.sequences} - {-1}
        assert self.limits is not None
        assert len(adapters) <= self.limits.max_loras
        self.steps.append(step)
        self.cost_model.observe(step.load, self.clock(step))
        for end in self.scheduler.commit(step, output):
            assert end.key not in self.finished
            self.finished[end.key] = end
        check_scheduler(self.scheduler)
        if not self.scheduler.has_work:
            self._overlapped = None
        return step

    def _begin_many(self) -> tuple[Step, Pending] | None:
        """Fill a pipeline. What a step writes is there for those that are started after it."""
        while len(self.in_flight) < self.scheduler.max_in_flight and (begun := self._begin()) is not None:
            step, pending = begun
            output = pending.wait()
            self.in_flight.append((step, OnWait(lambda output=output: output)))
            running = [key for step, _ in self.in_flight for key in _waiting_for(step)]
            assert len(set(running)) == len(running), "two steps have one sequence"
            check_scheduler(self.scheduler)
        return self.in_flight.popleft() if self.in_flight else None

    def close(self) -> None:
        """End all sequences, and keep their blocks where there is a folder for them."""
        for key in self.scheduler.unfinished:
            self.abort(key)
        if self.scheduler.offload is not None:
            self.scheduler.offload.close(saving=True)

    def _schedule(self) -> Step | None:
        offload = self.scheduler.offload
        while True:
            self._has_read.clear()
            if offload is not None:
                offload.restore(self.scheduler.num_running)
                check_scheduler(self.scheduler)
            step = self.scheduler.schedule()
            check_scheduler(self.scheduler)
            if step is not None or offload is None or (until := offload.waits_until) is None:
                return step
            self._has_read.wait(max(until - time.perf_counter(), 0.0))

    def _begin(self) -> tuple[Step, Pending] | None:
        step = self._schedule()
        if step is None:
            return None
        assert self.limits is not None
        rows = step.rows
        longest = max([span.end - span.start for span in rows.spans], default=1)
        padded = self.limits.padded(StepShape(len(rows.sequences), longest))
        assert rows.num_tokens <= self.limits.max_num_batched_tokens
        assert step.load.num_tokens == (padded.num_tokens if self.limits.shapes else rows.num_tokens)
        assert step.load.num_tokens <= self.limits.max_num_batched_tokens
        if self.limits.max_prefill_seqs is not None:
            assert len(rows.chunks) <= self.limits.max_prefill_seqs
        assert len(step.rows.sequences) + step.rows.num_starting <= self.limits.max_num_seqs
        if not self.limits.mixed_steps:
            assert not (step.rows.decodes and step.rows.chunks)
        if not self.limits.chunked_prefill:
            assert all(chunk.end == chunk.sequence.num_tokens for chunk in step.rows.chunks)
        return step, self._start(step)

    def _start(self, step: Step) -> Pending:
        rows = step.rows
        masks = self.masks.start(rows.constraints, rows.lookaheads) if self.scheduler.has_constraints else None
        batch = self.builder.build(step, masks)
        for row, sequence in enumerate(rows.sequences):
            for table, wanted in zip((batch.block_tables, *batch.window_tables), sequence.block_tables, strict=True):
                count = sequence.num_blocks
                assert (table[row, :count] == wanted[:count]).all(), "a table is not its sequence's"
        if self.scheduler.offload is not None:
            self.scheduler.offload.save_before_step()
        for group, pairs in step.copies.items():
            self._check_copies(pairs)
            self.executor.copy_blocks(np.array(pairs, dtype=np.int32), group)
        if step.state_copies:
            self.executor.copy_states(np.array(step.state_copies, dtype=np.int32))
        pending = self.executor.start(batch)
        self.scheduler.begin_step(step)
        return pending

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do; fails if that takes more than `limit` steps."""
        for _ in range(limit):
            if self.step() is None:
                assert not self.scheduler.has_work, "sequences are left that never run"
                assert self.cache.num_used == 0
                return
        raise AssertionError(f"not done after {limit} steps")

    def tokens(self, key: int) -> list[int]:
        """The tokens of a sequence so far."""
        return [token for token, _, _ in self.sampled[key]]

    def hypotheses(self, keys: list[int]) -> list[Hypothesis]:
        """What a search has found that has ended."""
        return [end.hypothesis for key in keys if (end := self.finished.get(key)) is not None and end.hypothesis]

    def _constraint(self, job: Job) -> SequenceConstraint | None:
        if job.constraints is None:
            return None
        return SequenceConstraint(
            job.constraints, job.sampling, tiny("byte-level"), eos_ids=self.eos_ids, vocab_size=self.vocab_size
        )

    @staticmethod
    def _check_copies(copies: Seq[tuple[int, int]]) -> None:
        sources, targets = {a for a, _ in copies}, [b for _, b in copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets)

    def _record(self, step: Step, output: StepOutput) -> None:
        rows = step.rows
        assert rows.num_rows == len(output.token_ids)
        got = rows.kept(output.token_ids.tolist())
        got += [(s, row) for row, s in enumerate(rows.sampled) if s.search is not None]
        for sequence, row in got:
            count = sequence.sampling.num_logprobs
            logprob = float(output.logprobs[row]) if output.logprobs is not None and count >= 0 else None
            self.sampled[sequence.key].append((int(output.token_ids[row]), logprob, _top(output, row, count)))
        for chunk in rows.chunks:
            for row, position in enumerate(chunk.scored, rows.scored(chunk).start):
                assert output.logprobs is not None
                assert output.ranks is not None
                top = _top(output, row, chunk.sequence.num_prompt_logprobs)
                found = (position, float(output.logprobs[row]), int(output.ranks[row]), top)
                self.scored[chunk.sequence.key].append(found)


def _waiting_for(step: Step) -> list[int]:
    """The keys of those who go on when the step has ended."""
    rows = step.rows
    chunks = [chunk.sequence for chunk in rows.chunks if not chunk.counts_early]
    return [sequence.key for sequence in (*rows.decodes, *chunks)]


def _top(output: StepOutput, row: int, count: int) -> bytes:
    if count < 0 or output.top_ids is None or output.top_logprobs is None:
        return b""
    return output.top_ids[row, :count].tobytes() + output.top_logprobs[row, :count].tobytes()


def alone(
    executor: Executor, max_length: int, job: Job, index: int, eos_ids: frozenset[int]
) -> tuple[list[Sampled], list[Scored]]:
    """What choice `index` of `job` samples when nothing else runs and its whole prompt is computed at once.

    Nothing is drafted for it. And the log-probabilities of its prompt.
    """
    driver = Driver(executor, max_length, eos_ids, enable_prefix_caching=False)
    driver.scheduler._decodes.drafts = None
    keys = driver.add(job)
    for key in keys:
        if key != keys[index]:
            driver.abort(key)
    driver.run()
    return driver.sampled[keys[index]], driver.scored[keys[index]]


def random_clock(seed: int) -> Callable[[Step], float]:
    """Step times that lead the cost model to all kinds of chunk sizes."""
    rng = random.Random(seed)
    return lambda step: rng.choice([0.1, 1.0, 5.0, 9.0, 11.0, 40.0, 1000.0])


def check_schedule(
    driver: Driver, moments: list[tuple[list[Job], list[int]]], make_roomy: Callable[[], Executor], oracle: Oracle
) -> None:
    """Fails unless all requests get what each gets alone on an executor of its own that `make_roomy` makes.

    At each of `moments` jobs arrive, and sequences are aborted: by a number, modulo those that there are.
    """
    expected: dict[int, tuple[list[Sampled], list[Scored]]] = {}
    for arriving, aborted in moments:
        for new in arriving:
            for index, key in enumerate(driver.add(new)):
                expected[key] = alone(make_roomy(), driver.max_length, new, index, driver.eos_ids)
                oracle.tell(key, [token for token, *_ in expected[key][0]])
        for number in aborted:
            if expected:
                driver.abort(number % len(expected))
        driver.step()
    driver.run()
    assert set(driver.finished) == set(expected)
    for key, (wanted, wanted_scores) in expected.items():
        sampled, scored = driver.sampled[key], driver.scored[key]
        if driver.finished[key].reason is FinishReason.ABORT:
            assert sampled == wanted[: len(sampled)]
            assert scored == wanted_scores[: len(scored)]
        else:
            assert (sampled, scored) == (wanted, wanted_scores)


def check_any_company(
    tested: Executor,
    reference: Executor,
    jobs: st.SearchStrategy[Job],
    *,
    max_length: int,
    eos_ids: frozenset[int],
    num_blocks: st.SearchStrategy[int],
    num_batched_tokens: st.SearchStrategy[int],
    max_examples: int,
    make_drafter: Callable[[], BatchDrafter] | None = None,
) -> None:
    """The property that a request gets the same bits beside any others as alone on `reference`.

    Requests arrive and are aborted at random times, in pools that are far too small and steps of any size. One of
    METHODS drafts tokens, or the drafter of `make_drafter`.
    """
    moment = st.tuples(st.lists(jobs, max_size=2), st.lists(st.integers(0, 20), max_size=1))

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=make_drafter is not None,  # how much its layer has drafted is asserted
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(moment, min_size=1, max_size=5),
        num_blocks,
        st.integers(1, 8),
        num_batched_tokens,
        st.integers(0, 99),
        METHODS,
        STAGES,
    )
    def property_holds(
        moments: list[tuple[list[Job], list[int]]],
        num_blocks: int,
        num_seqs: int,
        num_tokens: int,
        seed: int,
        method: str | None,
        stages: int,
    ) -> None:
        limits = dataclasses.replace(
            tested.limits,
            pipeline_stages=stages,
            num_blocks=num_blocks,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
            num_states=min(tested.limits.num_states, num_seqs + num_blocks),
            window_groups=tuple(
                dataclasses.replace(group, num_blocks=num_blocks) for group in tested.limits.window_groups
            ),
        )
        oracle = Oracle(seed)
        drafter: Drafter | BatchDrafter | None = None
        if limits.draft_limit != 0:
            drafter = drafter_of(method, oracle) if make_drafter is None else make_drafter()
        driver = Driver(tested, max_length, eos_ids, clock=random_clock(seed), limits=limits, drafter=drafter)
        expected: dict[int, tuple[list[Sampled], list[Scored]]] = {}
        # All of it first: both may be one executor, whose blocks are in use afterwards.
        lonely = [
            [[alone(reference, max_length, job, i, eos_ids) for i in range(job.sampling.n)] for job in arriving]
            for arriving, _ in moments
        ]
        for (arriving, aborted), found in zip(moments, lonely, strict=True):
            for job, choices in zip(arriving, found, strict=True):
                for key, (sampled, scored) in zip(driver.add(job), choices, strict=True):
                    expected[key] = sampled, scored
                    oracle.tell(key, [token for token, *_ in sampled])
            for number in aborted:
                driver.abort(number)
            driver.step()
        driver.run()
        for key, (sampled, scored) in expected.items():
            if driver.finished[key].reason is FinishReason.ABORT:
                sampled, scored = sampled[: len(driver.sampled[key])], scored[: len(driver.scored[key])]
            assert driver.sampled[key] == sampled
            assert driver.scored[key] == scored

    property_holds()
