"""A window through a device: the distribution of the next token at each of its positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.window import Window
from tidewheel.engine.errors import ModelError

ROWS = 64
"""The most distributions that are in memory at a time: a large vocabulary takes a megabyte for each."""


@runtime_checkable
class GivesLogits(Protocol):
    """An executor that gives all logits of a step as they are.

    Any other is asked for as many log-probabilities as there are tokens. It sorts them, which takes some milliseconds a
    row: on the CPU more than a small model takes for all else.
    """

    def logits(self, batch: StepBatch) -> tuple[StepOutput, NDArray[np.float32]]:
        """Run the batch: what it gives, and the logits of its rows `[R, vocab]`."""
        ...


def distributions(
    executor: Executor, window: NDArray[np.int32], first: int, vocab_size: int
) -> Iterator[NDArray[np.float32]]:
    """The logits or log-probabilities `[R, vocab]` of what follows the tokens from `first - 1` to the last but one.

    They come in the same pieces from every device. Call it from a thread that stays the same: the CPU device pins it.
    Raises ModelError for logits that are not finite.
    """
    limits, placed = executor.limits, Window(window, executor.limits)
    most = limits.max_num_batched_tokens if limits.chunked_prefill else len(window)
    computed = 0
    for begin in range(first - 1, len(window) - 1, ROWS):
        end = min(begin + ROWS, len(window) - 1)
        pieces = []
        # A device that runs prompts whole runs the window anew for each piece.
        start = computed if limits.chunked_prefill else 0
        while start < end:
            stop = min(start + most, end)
            rows = np.arange(max(begin, start), stop, dtype=np.int32) - start
            pieces.append(_step(executor, placed, start, stop, rows, vocab_size))
            start = stop
        computed = end
        yield np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _step(
    executor: Executor,
    window: Window,
    start: int,
    stop: int,
    rows: NDArray[np.int32],
    vocab_size: int,
) -> NDArray[np.float32]:
    sampling = SamplingBatch.greedy(rows + start + 1)
    if not isinstance(executor, GivesLogits):
        sampling.num_logprobs[:] = vocab_size
    batch = window.step(start, stop, sampling, rows)
    if isinstance(executor, GivesLogits):
        output, logits = executor.logits(batch)
    else:
        output, logits = _unsorted(executor.start(batch).wait(), vocab_size)
    if (output.token_ids < 0).any():
        raise ModelError(
            "the model computes logits that are not finite: its weights are broken, or their type is too narrow"
        )
    return logits


def _unsorted(output: StepOutput, vocab_size: int) -> tuple[StepOutput, NDArray[np.float32]]:
    logprobs = np.empty((len(output.token_ids), vocab_size), np.float32)
    if output.top_ids is not None and output.top_logprobs is not None:  # None in a step without rows
        np.put_along_axis(logprobs, output.top_ids, output.top_logprobs, axis=1)
    return output, logprobs
