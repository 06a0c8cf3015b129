"""What a calibration text shows of the inputs of a model's matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The inputs of one matrix `[N, K]`, over `count` rows.

    `squares [K] float32` is the mean of each input's square: how much an error of its weights counts. `gram [K, K]
    float32` is the mean of each pair's product, half of the Hessian of the output's squared error; None: it was not
    asked for.
    """

    count: int
    squares: NDArray[np.float32]
    gram: NDArray[np.float32] | None = None


class Calibration(Protocol):
    """Statistics of a model on a text."""

    def gather(self, names: Collection[str], *, grams: bool = False) -> Mapping[str, InputStatistics]:
        """Those of the matrices with these names (a DecoderSpec's), in a run of the text. Matrices that no token
        reached (experts that were not chosen), and those whose inputs cannot be watched, are left out.
        """
