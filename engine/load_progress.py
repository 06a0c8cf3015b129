"""How far loading and warming up are: a bar on a terminal, else lines in the log."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from .models.spec import DecoderSpec, tensor_shapes
from .weights.dtypes import DType
from .weights.quantization import TensorFormat
from .weights.tensor import WeightSource, WeightTensor

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_GIB = 2**30
_QUIET_S = 2.0  # a model that is there sooner needs no progress
_LOG_EVERY_S = 10.0
_WEIGHTS_BAR = {"desc": "Loading weights", "unit": "B", "unit_scale": True, "unit_divisor": 1024}
_WARM_UP_BAR = {"desc": "Warming up", "unit": " steps"}


class _Progress:
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

    def _show(self, done: int, whole: int, bar: Mapping[str, Any]) -> bool:
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


class LoadProgress(_Progress):
    """Of weights, `weight_bytes` when all are loaded."""

    def __init__(
        self,
        model: str,
        weight_bytes: int,
        *,
        stderr: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stderr, clock)
        self._model, self._bytes = model, weight_bytes

    def report(self, fraction: float) -> None:
        """That much of the weights was read, 0 to 1."""
        if self._show(int(fraction * self._bytes), self._bytes, _WEIGHTS_BAR):
            whole, percent = self._bytes / _GIB, 100 * fraction
            logger.info(
                "Loading %s: %.1f of %.1f GiB of weights (%.0f %%)", self._model, fraction * whole, whole, percent
            )


class WarmUpProgress(_Progress):
    """Of warming up a device."""

    def __init__(self, *, stderr: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stderr, clock)

    def report(self, done: int, steps: int) -> None:
        """So many of the kinds of steps are ready."""
        if self._show(done, steps, _WARM_UP_BAR):
            logger.info("Warmed up %d of %d kinds of steps", done, steps)


def _drawn(done: int, whole: int, stderr: TextIO, options: Mapping[str, Any]) -> tqdm[Any] | None:
    """A bar; None if the terminal has no size, as one of a container that nobody looks at."""
    from tqdm import tqdm

    bar = tqdm(initial=done, total=whole, file=stderr, leave=False, **options)
    if bar.ncols == 0 or bar.nrows == 0:
        bar.close()
        return None
    return bar


class ReportedWeights:
    """A WeightSource whose reading is reported: devices go through all names in turn."""

    def __init__(self, weights: WeightSource, spec: DecoderSpec, progress: LoadProgress) -> None:
        self._weights, self._progress = weights, progress
        self._sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
        self.dtype: DType = weights.dtype
        self.identity = weights.identity

    def __getitem__(self, name: str) -> WeightTensor:
        return self._weights[name]

    def stored_format(self, name: str) -> TensorFormat | None:
        """As the source has it."""
        return self._weights.stored_format(name)

    def __iter__(self) -> Iterator[str]:
        done, whole = 0, sum(self._sizes.values())
        for name in self._weights:
            yield name
            done += self._sizes[name]
            self._progress.report(done / whole)
