"""A step on its way, and what the host does with its rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ..batch import SamplingBatch, StepOutput
from ..sampling import sample_row


class Rows(NamedTuple):
    """Rows of a step on their way: indices into the batch's rows, and on the device their token ids.

    With `logits [R, vocab]` their tokens are picked on the host.
    """

    indices: NDArray[np.intp]
    token_ids: jax.Array
    logits: jax.Array | None


class TpuPending:
    """A step that the device computes. `samples_on_host`: the device does not know the tokens of all rows."""

    def __init__(self, sampling: SamplingBatch, rows: list[Rows]) -> None:
        self.samples_on_host = any(row.logits is not None for row in rows)
        # Such rows are looked at when the batch may have changed.
        self._sampling = sampling.copy() if self.samples_on_host else sampling
        self._rows = rows
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        """Fetch the tokens, and the logits of the rows that ask for more than a token."""
        output = self.result()
        self._rows.clear()
        return output

    def result(self) -> StepOutput:
        """The same, as often as wanted before `wait`."""
        if self._output is None:
            self._output = self._fetch()
        return self._output

    def _fetch(self) -> StepOutput:
        sampling, output = self._sampling, StepOutput.empty(self._sampling)
        if sampling.masks is not None:
            sampling.masks.wait()
        for rows in self._rows:
            count = len(rows.indices)
            if rows.logits is None:
                output.token_ids[rows.indices] = np.asarray(rows.token_ids)[:count]
                continue
            logits = np.asarray(rows.logits)[:count]
            for row, raw in zip(rows.indices.tolist(), logits, strict=True):
                sample_row(raw, sampling, row, output)
        return output
