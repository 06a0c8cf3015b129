"""How far the reading of weights is: a bar on a terminal, else lines in the log."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from .models.spec import DecoderSpec, tensor_shapes
from .weights.dtypes import DType
from .weights.quantization import TensorFormat
from .weights.tensor import WeightSource, WeightTensor

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_GIB = 2**30
_QUIET_S = 2.0  # a model that is there sooner needs no progress
_LOG_EVERY_S = 10.0


class LoadProgress:
    """Shows progress once loading has taken a while. A context manager, which ends the bar.

    `weight_bytes` is what all weights take when they are loaded. Whether `stderr` is a terminal decides on the form.
    """

    def __init__(
        self,
        model: str,
        weight_bytes: int,
        *,
        stderr: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._bytes, self._stderr, self._clock = model, weight_bytes, stderr, clock
        self._begun = clock()
        self._logged = self._begun
        self._terminal = stderr.isatty()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.refresh()  # tqdm draws now and then only
            self._bar.close()

    def report(self, fraction: float) -> None:
        """That much of the weights was read, 0 to 1."""
        now = self._clock()
        if now - self._begun < _QUIET_S:
            return
        if self._terminal and self._bar is None:
            self._bar = _bar(int(fraction * self._bytes), self._bytes, self._stderr)
            self._terminal = self._bar is not None
        if self._bar is not None:
            self._bar.update(int(fraction * self._bytes) - self._bar.n)
        elif now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            whole, percent = self._bytes / _GIB, 100 * fraction
            logger.info(
                "Loading %s: %.1f of %.1f GiB of weights (%.0f %%)", self._model, fraction * whole, whole, percent
            )


def _bar(done: int, whole: int, stderr: TextIO) -> tqdm[Any] | None:
    """A bar; None if the terminal has no size, as one of a container that nobody looks at."""
    from tqdm import tqdm

    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
    bar = tqdm(desc="Loading weights", initial=done, total=whole, file=stderr, **options)
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
