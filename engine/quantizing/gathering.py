"""Statistics of matrices' inputs, gathered for as many matrices at once as memory has room for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ModelError
from .gptq import Hessian
from .statistics import Calibration, InputStatistics

_FLOAT_BYTES = 4

Inputs = tuple[InputStatistics | None, Hessian | None]


class Gathering:
    """The statistics of the weights `sizes`, each with its number of inputs, which are asked for in that order.

    Each run of the text gathers gram matrices of at most `gram_bytes`, or one that is larger.
    """

    def __init__(self, calibration: Calibration | None, sizes: Mapping[str, int], gram_bytes: int) -> None:
        self._calibration, self._sizes, self._gram_bytes = calibration, sizes, gram_bytes
        self._gathered: dict[str, InputStatistics | None] = {}
        self._last: tuple[str, Inputs] = ("", (None, None))

    @property
    def has_text(self) -> bool:
        """Whether there is a text to gather from."""
        return self._calibration is not None

    def of(self, name: str) -> Inputs:
        """What is known of the inputs of the weight `name`. Raises ModelError if they are not finite."""
        if self._calibration is None:
            return None, None
        if self._last[0] != name:
            self._last = ("", (None, None))  # its memory is needed
            if name not in self._gathered:
                self._gather(self._calibration, name)
            self._last = (name, _inputs(name, self._gathered.pop(name)))
        return self._last[1]

    def _gather(self, calibration: Calibration, first: str) -> None:
        names, free = [first], self._gram_bytes - _gram_bytes(self._sizes[first])
        order = list(self._sizes)
        for name in order[order.index(first) + 1 :]:
            free -= _gram_bytes(self._sizes[name])
            if free < 0:
                break
            names.append(name)
        self._gathered.clear()
        found = calibration.gather(names, grams=True)
        self._gathered |= {name: found.get(name) for name in names}


def _gram_bytes(inputs: int) -> int:
    return _FLOAT_BYTES * inputs**2


def _inputs(name: str, statistics: InputStatistics | None) -> Inputs:
    if statistics is None or not statistics.squares.any():
        return None, None
    numbers = statistics.squares if statistics.gram is None else statistics.gram
    if not np.isfinite(numbers).all():
        raise ModelError(f"the calibration text makes inputs of {name} that are infinite or NaN: take another text")
    return statistics, None if statistics.gram is None else Hessian(statistics.gram)
