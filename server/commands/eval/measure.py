"""The run as a whole: models are found and loaded, then each window goes through both."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidewheel import __version__
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.inspection import shape_of
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.progress import Progress

from .distributions import distributions
from .model import Subject, find, find_reference, require_memory, tokenizer_of
from .report import ModelFacts, Report, TextResult
from .scores import Scores, score
from .windows import DEFAULT_CONTEXT, Windows, split

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


def measure(
    options: EngineOptions, name: str, texts: Sequence[Path], context: int | None, reference: str | None, say: Say
) -> Report:
    """Evaluate a model on texts, with windows of `context` tokens. `say` gets progress messages.

    Raises TidewheelError if a model or a text cannot be used.
    """
    subjects = [find(options, name)]
    if reference is not None:
        subjects.append(find_reference(reference, subjects[0]))
    context = _context(context, subjects)
    tokenizer = tokenizer_of(subjects[0])
    vocab_size = subjects[0].opened.spec.vocab_size
    split_texts = [split(path, tokenizer, context, vocab_size) for path in texts]
    require_memory(subjects, context)
    say("loading the model" + " and its reference" * (reference is not None))
    with contextlib.ExitStack() as loaded:
        executors = []
        for subject in subjects:
            executors.append(executor := subject.load(context))
            loaded.callback(executor.close)
        say(f"scoring {sum(text.num_scored for text in split_texts)} tokens")
        started = time.perf_counter()
        scores = _in_a_thread(executors, split_texts, vocab_size)
        seconds = time.perf_counter() - started
    results = [_result(text.name, [text], own) for text, own in zip(split_texts, scores, strict=True)]
    return Report(
        version=__version__,
        model=_facts(subjects[0]),
        reference=_facts(subjects[1]) if reference is not None else None,
        context=context,
        added_tokens=split_texts[0].num_added,
        texts=results,
        total=_result("all", split_texts, Scores.joined(scores)),
        seconds=seconds,
    )


def _context(asked: int | None, subjects: Sequence[Subject]) -> int:
    longest = min(subjects, key=lambda subject: subject.max_context)
    if asked is None:
        return min(DEFAULT_CONTEXT, longest.max_context)
    if asked > longest.max_context:
        raise ModelError(
            f"--context {asked} is more than the {longest.max_context} tokens that {longest.name} takes: lower it, or "
            "raise --max-model-len if that was given"
        )
    return asked


class _ScoreProgress(Progress):
    """The progress of scoring `total` tokens."""

    def __init__(self, total: int) -> None:
        super().__init__(sys.stderr, time.monotonic)
        self._total, self._done = total, 0

    def report(self, count: int) -> None:
        """`count` more are scored."""
        self._done += count
        if self.show(self._done, self._total, {"desc": "Scoring", "unit": " tokens"}):
            logger.info("%d of %d tokens are scored", self._done, self._total)


def _in_a_thread(executors: Sequence[Executor], texts: Sequence[Windows], vocab_size: int) -> list[Scores]:
    """The scores of each text, computed in one thread that is not the main one: devices pin it to a core."""
    stopped = threading.Event()

    def run(progress: _ScoreProgress) -> list[Scores]:
        return [Scores.joined([*_scores(executors, text, vocab_size, progress, stopped)]) for text in texts]

    total = sum(text.num_scored for text in texts)
    with _ScoreProgress(total) as progress, ThreadPoolExecutor(1, thread_name_prefix="tidewheel-eval") as steps:
        try:
            return steps.submit(run, progress).result()
        except BaseException:  # Ctrl-C while it waits: the pool waits for its thread
            stopped.set()
            raise


def _scores(
    executors: Sequence[Executor],
    text: Windows,
    vocab_size: int,
    progress: _ScoreProgress,
    stopped: threading.Event,
) -> Iterator[Scores]:
    first = text.first_scored
    for window in text.windows:
        begin = first
        pieces = [distributions(executor, window, first, vocab_size) for executor in executors]
        for found in zip(*pieces, strict=True):
            tokens: NDArray[np.int32] = window[begin : begin + len(found[0])]
            yield score(tokens, *found)
            progress.report(len(tokens))
            begin += len(tokens)
            if stopped.is_set():
                return


def _result(name: str, texts: Sequence[Windows], scores: Scores) -> TextResult:
    return TextResult(
        name=name,
        tokens=sum(text.num_tokens for text in texts),
        windows=sum(len(text.windows) for text in texts),
        scored=len(scores.nll),
        perplexity=scores.perplexity,
        divergence=scores.divergence,
    )


def _facts(subject: Subject) -> ModelFacts:
    opened, weight_bytes = subject.opened, subject.weight_bytes
    shape = shape_of(opened.spec)
    return ModelFacts(
        name=subject.name,
        family=shape.family,
        parameters=shape.parameters,
        vocab_size=shape.vocab_size,
        device=opened.device.name,
        isa=opened.device.isa,
        weights=opened.kept_as,
        weight_bytes=weight_bytes,
        bits_per_weight=weight_bytes * 8 / shape.parameters,
        kv_cache_dtype=opened.kv_cache_dtype,
    )
