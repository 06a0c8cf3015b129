"""Statistics of a loaded model's inputs, from texts that it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch
from ..devices.cpu.executor import CpuExecutor
from ..devices.window import Window
from .statistics import InputStatistics

_PIECE_TOKENS = 128  # the inputs of all matrices are in memory for so many at a time: a few percent of the weights
_NO_ROWS = np.empty(0, np.int32)


class _Sums:
    def __init__(self, inputs: int, *, gram: bool) -> None:
        self.count = 0
        self.squares = np.zeros(inputs, np.float64)
        self.gram = np.zeros((inputs, inputs), np.float32) if gram else None

    def add(self, rows: NDArray[np.float32]) -> None:
        self.count += len(rows)
        self.squares += np.einsum("ti,ti->i", rows, rows)  # a piece of them in float32, which is as exact, and faster
        if self.gram is not None:
            self.gram += rows.T @ rows

    def mean(self) -> InputStatistics:
        if self.gram is not None:
            self.gram /= np.float32(self.count)
        return InputStatistics(self.count, (self.squares / self.count).astype(np.float32), self.gram)


class TextCalibration:
    """A Calibration on windows of tokens, `[N] int32` each: an executor computes each of them from its beginning.

    `report` is called with the number of tokens that were computed, and of all.
    """

    def __init__(
        self, executor: CpuExecutor, windows: Sequence[NDArray[np.int32]], report: Callable[[int, int], None]
    ) -> None:
        self._executor, self._windows, self._report = executor, windows, report

    def gather(self, names: Collection[str], *, grams: bool = False) -> Mapping[str, InputStatistics]:
        """The statistics of the matrices with these names. Raises ValueError for a name that is no matrix."""
        # In one thread that is not the main one, because the device pins it to a core.
        with ThreadPoolExecutor(1, thread_name_prefix="tidewheel-calibration") as steps:
            return steps.submit(self._gather, list(names), grams).result()

    def _gather(self, names: Sequence[str], grams: bool) -> dict[str, InputStatistics]:
        sums: dict[tuple[str, ...], _Sums] = {}
        done, whole = 0, sum(map(len, self._windows))
        for tokens in self._windows:
            window = Window(tokens, self._executor.limits)
            for start in range(0, len(tokens), _PIECE_TOKENS):
                stop = min(start + _PIECE_TOKENS, len(tokens))
                batch = window.step(start, stop, SamplingBatch.greedy(_NO_ROWS), _NO_ROWS)
                for same, rows in self._executor.inputs(batch, names):
                    key = tuple(same)
                    if key not in sums:
                        sums[key] = _Sums(rows.shape[1], gram=grams)
                    sums[key].add(rows)
                done += stop - start
                self._report(done, whole)
        return {name: shared for same, found in sums.items() for shared in (found.mean(),) for name in same}
