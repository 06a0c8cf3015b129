"""The run as a whole: the model is found, computes the calibration text, and is written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tidewheel.engine.devices.cpu.executor import CpuExecutor
from tidewheel.engine.errors import ModelError
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.progress import BYTES, Progress
from tidewheel.engine.quantizing.calibration import TextCalibration
from tidewheel.engine.quantizing.folder import quantize_folder
from tidewheel.engine.quantizing.gguf import quantize_gguf
from tidewheel.engine.quantizing.layouts import FOLDER_METHODS, FolderMethod, is_folder_method
from tidewheel.engine.quantizing.report import Report
from tidewheel.engine.quantizing.statistics import Calibration
from tidewheel.engine.weights.block_mix import BLOCK_MIXES, BlockMix
from tidewheel.engine.weights.folder_source import FolderSource
from tidewheel.engine.weights.gguf.source import GgufSource

from ..eval.model import Subject, find, require_memory, tokenizer_of
from ..eval.windows import Windows, split

logger = logging.getLogger(__name__)


Kind = BlockMix | FolderMethod
KINDS: tuple[Kind, ...] = (*BLOCK_MIXES, *FOLDER_METHODS)


def quantize(options: EngineOptions, out: Path, kind: Kind, texts: Sequence[Path], context: int) -> Report:
    """Write the model of `options` to `out`; with texts, calibrated on windows of `context` tokens of them.

    Raises TidewheelError.
    """
    subject = find(options, options.model)
    windows = windows_of(subject, texts, context)
    with contextlib.ExitStack() as stack:
        write = _writer(subject, out, kind)
        calibration = stack.enter_context(calibration_on(subject, windows)) if windows else None
        progress = stack.enter_context(_Progress("Quantizing", BYTES))
        return write(
            calibration=calibration, text_identity=_digest(windows), threads=_threads(), on_progress=progress.report
        )


def _writer(subject: Subject, out: Path, kind: Kind) -> Callable[..., Report]:
    """What writes the model as that kind. Raises ModelError for a kind that its files cannot become."""
    source, description = subject.opened.source, subject.opened.description
    if isinstance(source, GgufSource):
        if is_folder_method(kind):
            raise ModelError(
                f"--type {kind} is made of a Hugging Face folder in floats, and {subject.name} is a GGUF file: name "
                f"the folder that it was made from, or take one of {', '.join(BLOCK_MIXES)}"
            )
        return functools.partial(quantize_gguf, source, description, out, kind)
    assert isinstance(source, FolderSource)
    if not is_folder_method(kind):
        raise ModelError(
            f"--type {kind} is made of a GGUF file, and {subject.name} is a folder: convert it to GGUF with "
            f"llama.cpp's convert_hf_to_gguf.py first, or take one of {', '.join(FOLDER_METHODS)}"
        )
    return functools.partial(quantize_folder, source.folder, out, kind)


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def windows_of(subject: Subject, texts: Sequence[Path], context: int) -> list[Windows]:
    """Texts to calibrate on, in the model's tokens. Raises TidewheelError."""
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
def calibration_on(subject: Subject, texts: Sequence[Windows]) -> Iterator[Calibration]:
    """A context in which the model is loaded, for calibrations on texts. Raises TidewheelError."""
    windows = [window for text in texts for window in text.windows]
    longest = max(map(len, windows))
    require_memory([subject], longest)
    executor = subject.load(longest)
    with contextlib.closing(executor), _Progress("Calibrating", {"unit": " tokens"}) as progress:
        assert isinstance(executor, CpuExecutor)
        yield TextCalibration(executor, windows, progress.report)
