"""Shared by tests of layers for drafts: requests, and an engine that notes what is drafted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from engine.constraints.grammars import grammar
from engine.driving import Driver, Job
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.devices.batch import StepBatch
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.mtp import MtpDrafter

MAX_LENGTH = 160  # tokens, prompt and output together
PROMPT = tuple(range(40, 77))
DRAFT_TOKENS = 3
EOS = frozenset({0, 1})
REGEX = r"(high|low) tide[\s\S]*"

OPTIONS = ExecutorOptions(
    dtype="float32",
    kv_cache_bytes=None,
    max_model_len=256,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    num_blocks=64,
    layer_draft_tokens=DRAFT_TOKENS,
)


class Recorder:
    """The executor's draft tokens, each with how many tokens its sequence had."""

    def __init__(self, executor: Any) -> None:
        self.limits = executor.limits
        self.copy_blocks = executor.copy_blocks
        self.draft_tokens: list[tuple[int, list[int]]] = []
        self._executor = executor

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], min_probability: float = 0.0) -> NDArray[np.int32]:
        draft_tokens: NDArray[np.int32] = self._executor.draft(batch, counts, min_probability)
        for length, row in zip(batch.context_len.tolist(), draft_tokens.tolist(), strict=True):
            self.draft_tokens.append((length, row))
        return draft_tokens


def drafting(executor: Executor, num_tokens: int = DRAFT_TOKENS, **limits: Any) -> tuple[Driver, Recorder]:
    """An engine whose draft tokens seem to take no time."""
    recorder = Recorder(executor)
    drafter = MtpDrafter(recorder, num_tokens, max_context=1000, clock=lambda: 0.0)  # type: ignore[arg-type]
    narrowed = dataclasses.replace(executor.limits, **limits)
    return Driver(executor, MAX_LENGTH, EOS, clock=lambda step: 5.0, drafter=drafter, limits=narrowed), recorder


def job(max_tokens: int = 30, prompt: tuple[int, ...] = PROMPT, seed: int = 11, **sampling: Any) -> Job:
    return Job(prompt, SamplingParams(max_tokens=max_tokens, logprobs=2, ignore_eos=True, **sampling), seed)


def right(driver: Driver) -> tuple[int, int]:
    """How many draft tokens there were, and how many of them were right."""
    assert driver.scheduler.drafts is not None
    stats = driver.scheduler.drafts.stats
    return stats.draft_tokens_total, stats.accepted_total


def constraints(regex: str) -> TokenConstraints:
    return TokenConstraints(grammar=grammar("regex", regex, 320, EOS))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stem = draw(st.integers(0, 40))
    tail = draw(st.lists(st.integers(4, 300), min_size=0 if stem else 1, max_size=6))
    sampling = SamplingParams(
        max_tokens=draw(st.sampled_from([1, 4, 20, 40])),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2])),
        n=draw(st.sampled_from([1, 1, 1, 3])),
        logprobs=draw(st.sampled_from([None, 0, 5])),
        prompt_logprobs=draw(st.sampled_from([None, None, 5])),
    )
    prompt = (*((7 * i) % 300 + 4 for i in range(stem)), *tail)
    regex = draw(st.sampled_from([None, None, r"[\s\S]*", REGEX]))
    rules = None if regex is None else constraints(regex)
    return Job(prompt, sampling, draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from([0, 0, 1])), constraints=rules)
