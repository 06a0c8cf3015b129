"""EngineCoreOutputs: what a step, or the end of a sequence, means for the streams of the requests that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..devices.batch import StepOutput
from ..outputs import PromptLogprobs, SequenceTimes, TokenLogprob
from ..scheduling.rows import Chunk
from ..scheduling.step import Finished, Step
from ..sequences.sequence import Sequence


class Started(NamedTuple):
    """A sequence whose prompt is computed for the first time, except `num_cached_tokens` that were in the cache."""

    key: int
    num_cached_tokens: int
    times: SequenceTimes


@dataclass(slots=True)
class EngineCoreOutputs:
    """What a step, or a message, means for the streams: `token_ids[i]` belongs to the sequence `keys[i]`.

    A sequence may have several, in order. `logprobs` has the log-probabilities of token i if they are wanted, and
    `scored` those of parts of prompts. `preempted` sequences had to make way for the step. Call `passed_on` when all of
    it is passed on. With a `failure`, the engine and all streams are dead.
    """

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    scored: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    passed_on: Callable[[], None] | None = None
    failure: BaseException | None = None


def outputs_of(step: Step, output: StepOutput, now: float) -> EngineCoreOutputs:
    """What a step means for the streams, without the ends of sequences."""
    rows = step.rows
    token_ids: list[int] = output.token_ids[: rows.num_sampled].tolist()
    if rows.drafts or rows.has_beams:
        kept = rows.kept(token_ids)
        outputs = EngineCoreOutputs([sequence.key for sequence, _ in kept], [token_ids[row] for _, row in kept])
        if output.logprobs is not None:
            outputs.logprobs = _logprobs(kept, output)
    else:
        sampled = rows.sampled
        outputs = EngineCoreOutputs([sequence.key for sequence in sampled], token_ids)
        if output.logprobs is not None:
            outputs.logprobs = _logprobs(zip(sampled, range(len(sampled)), strict=True), output)
    for chunk in rows.chunks:
        outputs.started += _started(chunk, now)
        if chunk.num_scored:
            logprobs = _prompt_logprobs(output, rows.scored(chunk), chunk.sequence.num_prompt_logprobs)
            outputs.scored.append((chunk.sequence.key, logprobs))
    return outputs


def _logprobs(rows: Iterable[tuple[Sequence, int]], output: StepOutput) -> dict[int, TokenLogprob]:
    return {
        i: _token_logprob(output, row, count)
        for i, (sequence, row) in enumerate(rows)
        if (count := sequence.sampling.num_logprobs) >= 0
    }


def _started(chunk: Chunk, now: float) -> list[Started]:
    """All choices get the cached tokens and the time of the choice that computed the prompt."""
    first = chunk.sequence
    num_cached_tokens, scheduled = first.num_cached_tokens or 0, first.scheduled_at
    return [Started(s.key, num_cached_tokens, SequenceTimes(s.queued_at, scheduled, now)) for s in chunk.started]


def _prompt_logprobs(output: StepOutput, rows: slice, count: int) -> PromptLogprobs:
    assert output.logprobs is not None
    assert output.ranks is not None
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    # Copies, so that the whole step's arrays can go.
    return PromptLogprobs(
        output.logprobs[rows].copy(),
        output.ranks[rows].copy(),
        output.top_ids[rows, :count].copy(),
        output.top_logprobs[rows, :count].copy(),
    )


def _token_logprob(output: StepOutput, row: int, count: int) -> TokenLogprob:
    assert output.logprobs is not None
    logprob = float(output.logprobs[row])
    if count == 0 or output.top_ids is None or output.top_logprobs is None:
        return TokenLogprob(logprob)
    ids, values = output.top_ids[row, :count].tolist(), output.top_logprobs[row, :count].tolist()
    return TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
