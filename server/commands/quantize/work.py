"""The run as a whole: the model is found, computes the calibration text, and is written."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tidewheel.engine.devices.cpu.executor import CpuExecutor
from tidewheel.engine.errors import ModelError
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.progress import BYTES, Progress
from tidewheel.engine.quantizing.calibration import TextCalibration
from tidewheel.engine.quantizing.gguf import quantize_gguf
from tidewheel.engine.quantizing.report import Report
from tidewheel.engine.quantizing.statistics import Calibration
from tidewheel.engine.weights.block_mix import BlockMix
from tidewheel.engine.weights.gguf.source import GgufSource

from ..eval.model import Subject, find, require_memory, tokenizer_of
from ..eval.windows import Windows, split

logger = logging.getLogger(__name__)


def quantize(options: EngineOptions, out: Path, mix: BlockMix, texts: Sequence[Path], context: int) -> Report:
    """Write the model of `options` to `out`; with texts, calibrated on windows of `context` tokens of them.

    Raises TidewheelError.
    """
    subject = find(options, options.model)
    source = subject.opened.source
    if not isinstance(source, GgufSource):
        raise ModelError(f"{options.model} is no GGUF file, so --type {mix} cannot be written of it")
    windows = _windows(subject, texts, context)
    with contextlib.ExitStack() as stack:
        calibration = stack.enter_context(_calibration(subject, windows)) if windows else None
        progress = stack.enter_context(_Progress("Quantizing", BYTES))
        return quantize_gguf(
            source,
            subject.opened.description,
            out,
            mix,
            calibration=calibration,
            calibrated_on=_digest(windows),
            threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            report=progress.report,
        )


def _windows(subject: Subject, texts: Sequence[Path], context: int) -> list[Windows]:
    if not texts:
        return []
    tokenizer, vocab_size = tokenizer_of(subject), subject.opened.spec.vocab_size
    context = min(context, subject.max_context)
    return [split(path, tokenizer, context, vocab_size, "--calibrate") for path in texts]


def _digest(texts: Sequence[Windows]) -> str:
    digest = hashlib.sha256()
    for window in (window for text in texts for window in text.windows):
        digest.update(len(window).to_bytes(4, "little") + window.tobytes())
    return digest.hexdigest() if texts else ""


class _Progress(Progress):
    """The progress of a part of the work."""

    def __init__(self, what: str, unit: dict[str, Any]) -> None:
        super().__init__(sys.stderr, time.monotonic)
        self._what, self._bar_options = what, {"desc": what, **unit}

    def report(self, done: int, whole: int) -> None:
        """`done` of `whole` is done."""
        if self.show(done, whole, self._bar_options):
            logger.info("%s: %.0f %%", self._what, 100 * done / whole)


@contextlib.contextmanager
def _calibration(subject: Subject, texts: Sequence[Windows]) -> Iterator[Calibration]:
    windows = [window for text in texts for window in text.windows]
    longest = max(map(len, windows))
    require_memory([subject], longest)
    executor = subject.load(longest)
    with contextlib.closing(executor), _Progress("Calibrating", {"unit": " tokens"}) as progress:
        assert isinstance(executor, CpuExecutor)
        yield TextCalibration(executor, windows, progress.report)
