"""How far loading and warming up are."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from ..models.spec import DecoderSpec, tensor_shapes
from ..progress import BYTES, Progress
from ..weights.dtypes import DType
from ..weights.quantization import TensorFormat
from ..weights.tensor import WeightSource, WeightTensor

logger = logging.getLogger(__name__)

_GIB = 2**30
_WEIGHTS_BAR = {"desc": "Loading weights", **BYTES}
_WARM_UP_BAR = {"desc": "Warming up", "unit": " steps"}


class LoadProgress(Progress):
    """The progress of loading weights: `weight_bytes` in all."""

    def __init__(
        self,
        model: str,
        weight_bytes: int,
        *,
        told: Callable[[float], None] | None = None,
        stderr: TextIO = sys.stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`told` is called with each fraction as well."""
        super().__init__(stderr, clock)
        self._model, self._bytes, self._told = model, weight_bytes, told

    def report(self, fraction: float) -> None:
        """`fraction` of the weights was read, 0 to 1."""
        if self._told is not None:
            self._told(fraction)
        if self.show(int(fraction * self._bytes), self._bytes, _WEIGHTS_BAR):
            whole, percent = self._bytes / _GIB, 100 * fraction
            logger.info(
                "Loading %s: %.1f of %.1f GiB of weights (%.0f %%)", self._model, fraction * whole, whole, percent
            )


class WarmUpProgress(Progress):
    """The progress of warming up a device."""

    def __init__(self, *, stderr: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stderr, clock)

    def report(self, done: int, steps: int) -> None:
        """`done` of the `steps` kinds of steps are ready."""
        if self.show(done, steps, _WARM_UP_BAR):
            logger.info("Warmed up %d of %d kinds of steps", done, steps)


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
