"""Drives scheduler, builder and executor without threads, checking the books after every move."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from engine.tiny_tokenizers import tiny

from tidewheel.engine.batch import StepBatch
from tidewheel.engine.batch_builder import BatchBuilder
from tidewheel.engine.blocks import BlockPool
from tidewheel.engine.constraints.constraint import SequenceConstraint, TokenConstraints
from tidewheel.engine.constraints.masks import MaskWriter, mask_words
from tidewheel.engine.cost_model import CostModel
from tidewheel.engine.devices.base import Executor, ExecutorLimits
from tidewheel.engine.request import SamplingParams
from tidewheel.engine.scheduler import Finished, Scheduler, Step
from tidewheel.engine.sequence import Sequence as EngineSequence

Sampled = tuple[int, float | None, bytes]  # token, logprob, most likely tokens


@dataclass(frozen=True)
class Job:
    """A request as the scheduler's tests know it. `prompt` is at least one token."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    priority: int = 0
    cache_salt: str | None = None
    constraints: TokenConstraints | None = None


@dataclass
class Driver:
    """An engine without threads, streams and text.

    `clock(step)` says how long a step took, in milliseconds. `limits` may be narrower than the executor's own.
    """

    executor: Executor
    max_length: int
    eos_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    clock: Callable[[Step], float] = lambda step: 1.0
    limits: ExecutorLimits | None = None
    vocab_size: int = 320  # at least the executor's
    sampled: dict[int, list[Sampled]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = self.limits = self.limits or self.executor.limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.cost_model = CostModel(max_step_ms=10.0)
        self.scheduler = Scheduler(self.pool, self.cost_model, limits, enable_prefix_caching=self.enable_prefix_caching)
        self.builder = BatchBuilder()
        self.masks = MaskWriter(self.vocab_size)
        self._arrivals = 0
        self._keys = 0

    def add(self, job: Job) -> list[int]:
        """Queue a job's choices; returns their keys."""
        keys = []
        for index in range(job.sampling.n):
            sequence = EngineSequence(
                self._keys,
                np.array(job.prompt, dtype=np.int32),
                job.sampling,
                index=index,
                seed=job.seed,
                arrival=self._arrivals,
                priority=job.priority,
                cache_salt=job.cache_salt,
                eos_ids=self.eos_ids,
                max_length=self.max_length,
                block_size=self.pool.block_size,
                constraint=self._constraint(job),
            )
            self.scheduler.add(sequence)
            self.sampled[self._keys] = []
            keys.append(self._keys)
            self._keys += 1
        self._arrivals += 1
        self.scheduler.check()
        return keys

    def abort(self, key: int) -> None:
        """End a sequence, if it has not ended."""
        end = self.scheduler.abort(key)
        if end is not None:
            self.finished[key] = end
        self.scheduler.check()

    def step(self) -> Step | None:
        """Run one step."""
        step = self.scheduler.schedule()
        self.scheduler.check()
        if step is None:
            return None
        assert self.limits is not None
        assert step.load.num_tokens <= self.limits.max_num_batched_tokens
        assert len(step.decodes) + len(step.chunks) <= self.limits.max_num_seqs
        if not self.limits.mixed_steps:
            assert not (step.decodes and step.chunks)
        if not self.limits.chunked_prefill:
            assert all(chunk.is_last for chunk in step.chunks)
        batch = self.builder.build(step)
        batch.sampling.masks = self.masks.start(step.sampled()) if self.scheduler.has_constraints else None
        rows = [s.key for s in step.decodes] + [c.sequence.key for c in step.chunks if c.is_last]
        self._record(rows, batch)
        self.steps.append(step)
        self.cost_model.observe(step.load, self.clock(step))
        for end in self.scheduler.commit(step, self._token_ids):
            assert end.key not in self.finished
            self.finished[end.key] = end
        self.scheduler.check()
        return step

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do; fails if that takes more than `limit` steps."""
        for _ in range(limit):
            if self.step() is None:
                assert not self.scheduler.has_work, "sequences are left that never run"
                assert self.pool.num_used == 0
                return
        raise AssertionError(f"not done after {limit} steps")

    def tokens(self, key: int) -> list[int]:
        """The tokens of a sequence so far."""
        return [token for token, _, _ in self.sampled[key]]

    def _constraint(self, job: Job) -> SequenceConstraint | None:
        if job.constraints is None:
            return None
        words = mask_words(self.vocab_size)
        return SequenceConstraint(
            job.constraints, job.sampling, tiny("byte-level"), eos_ids=self.eos_ids, mask_words=words
        )

    def _record(self, rows: Sequence[int], batch: StepBatch) -> None:
        output = self.executor.step(batch)
        self._token_ids: list[int] = output.token_ids.tolist()
        assert len(rows) == len(self._token_ids)
        for row, key in enumerate(rows):
            logprob, top = None, b""
            count = int(batch.sampling.num_logprobs[row])
            if output.logprobs is not None and count >= 0:
                logprob = float(output.logprobs[row])
                if output.top_ids is not None and output.top_logprobs is not None:
                    top = output.top_ids[row, :count].tobytes() + output.top_logprobs[row, :count].tobytes()
            self.sampled[key].append((self._token_ids[row], logprob, top))


def alone(executor: Executor, max_length: int, job: Job, index: int, eos_ids: frozenset[int]) -> list[Sampled]:
    """What choice `index` of `job` samples when nothing else runs and its whole prompt is computed at once."""
    driver = Driver(executor, max_length, eos_ids, enable_prefix_caching=False)
    keys = driver.add(job)
    for key in keys:
        if key != keys[index]:
            driver.abort(key)
    driver.run()
    return driver.sampled[keys[index]]


def random_clock(seed: int) -> Callable[[Step], float]:
    """Step times that lead the cost model to all kinds of chunk sizes."""
    rng = random.Random(seed)
    return lambda step: rng.choice([0.1, 1.0, 5.0, 9.0, 11.0, 40.0, 1000.0])
