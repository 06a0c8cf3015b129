"""How far something is that takes long: a bar on a terminal, else lines in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self

logger = logging.getLogger(__name__)

BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
"""tqdm's options for a bar that counts bytes."""

Report: TypeAlias = Callable[[int, int], None]
"""Is told the bytes that are here, and those that are known to come in all. Any thread may call it."""

_GIB = 2**30
_QUIET_S = 2.0  # what is there sooner needs no progress
_LOG_EVERY_S = 10.0
_DOWNLOAD_BAR = {"desc": "Downloading", **BYTES}


_watch: ContextVar[Callable[[], Report] | None] = ContextVar("watch", default=None)


@contextmanager
def watched_downloads(watch: Callable[[], Report]) -> Iterator[None]:
    """Within, in this thread, `watch` is called for each download that begins. What it returns is told the progress.

    Nothing is shown on a terminal.
    """
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


class Progress:
    """Shows how far something is once it has taken a while. A context manager, which ends the bar.

    Whether `stderr` is a terminal decides on the form.
    """

    def __init__(self, stderr: TextIO, clock: Callable[[], float]) -> None:
        self._stderr, self._clock = stderr, clock
        self._begun = self._logged = clock()
        self._terminal = stderr.isatty()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.refresh()  # tqdm draws now and then only
            self._bar.close()

    def show(self, done: int, whole: int, bar: Mapping[str, Any]) -> bool:
        """Draw it, with what tqdm is to be told of the bar; whether it is time for a line in the log instead."""
        now = self._clock()
        if now - self._begun < _QUIET_S:
            return False
        if self._terminal and self._bar is None:
            self._bar = _drawn(done, whole, self._stderr, bar)
            self._terminal = self._bar is not None
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            return False
        if now - self._logged < _LOG_EVERY_S:
            return False
        self._logged = now
        return True


class DownloadProgress(Progress):
    """The progress of downloading a model's files. Any thread may report."""

    def __init__(
        self, model: str, *, bar: bool = True, stderr: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without `bar` there are lines in the log alone."""
        super().__init__(stderr, clock)
        watch = _watch.get()
        self._tell = None if watch is None else watch()
        self._terminal = self._terminal and bar and watch is None
        self._model = model
        self._lock = threading.Lock()
        self._done = 0

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if raised[0] is None and self._done:
            seconds = self._clock() - self._begun
            logger.info("Downloaded %s: %.2f GiB in %.1f s", self._model, self._done / _GIB, seconds)

    def report(self, done: int, whole: int) -> None:
        """`done` bytes are here, of the `whole` that are known to come."""
        if self._tell is not None:
            self._tell(done, whole)
        with self._lock:
            self._done = done
            shown = self.show(done, whole, _DOWNLOAD_BAR)
            if self._bar is not None:
                self._bar.total = whole
        if shown:
            percent = 100 * done / whole if whole else 0
            logger.info("Downloading %s: %.2f of %.2f GiB (%.0f %%)", self._model, done / _GIB, whole / _GIB, percent)


class AnswerProgress(Progress):
    """The progress of answering `total` of something, `unit` in the singular. Any thread may report."""

    def __init__(
        self,
        unit: str,
        total: int,
        done: int = 0,
        *,
        stderr: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stderr, clock)
        self._unit, self._total, self._done = unit, total, done
        self._bar_options = {"desc": f"{unit.capitalize()}s", "unit": unit, "leave": True, "dynamic_ncols": True}
        self._lock = threading.Lock()

    def report(self, count: int) -> None:
        """`count` more are answered."""
        with self._lock:
            self._done += count
            done = self._done
            shown = self.show(done, self._total, self._bar_options)
        if shown:
            logger.info("%d of %d %ss are answered (%.0f %%)", done, self._total, self._unit, 100 * done / self._total)


def _drawn(done: int, whole: int, stderr: TextIO, options: Mapping[str, Any]) -> tqdm[Any] | None:
    """A bar; None if the terminal has no size, as in a container that is not looked at."""
    from tqdm import tqdm

    bar = tqdm(initial=done, total=whole, file=stderr, **{"leave": False, **options})
    if bar.ncols == 0 or bar.nrows == 0:
        bar.close()
        return None
    return bar
