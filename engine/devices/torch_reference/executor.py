"""Batches, a few of their tokens at a time, through a loaded decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...weights.lora import LoraAdapter
from ..batch import StepBatch, StepOutput
from ..executor import Executor, OnWait
from ..limits import ExecutorLimits
from ..sampling import sample_row
from ..tower import TowerExecutor
from .decoder import TorchDecoder


class TorchExecutor(Executor):
    """A loaded model. `tokens_per_pass` is how many of a batch's tokens go through the decoder together.

    It is 1, because torch picks its kernels, their blocking and the handling of their last lanes by the number of
    rows. So the last bits of a token would depend on the other tokens. Alone, a token is computed with the same shapes
    in every batch, and its result is the same to the bit. Raising it trades that for speed. Tokens that see each other
    go through it together, as in every batch.
    """

    tokens_per_pass = 1

    def __init__(self, decoder: TorchDecoder, limits: ExecutorLimits) -> None:
        self.limits = limits
        self._decoder: TorchDecoder | None = decoder
        self._towers: list[TowerExecutor] = []

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Nothing: operations run as they are."""

    def start(self, batch: StepBatch) -> OnWait:
        """Run the batch, write its K and V, and sample its rows, when it is waited for."""
        return OnWait(partial(self._step, batch))

    def _step(self, batch: StepBatch) -> StepOutput:
        decoder, output = self._loaded(), StepOutput.empty(batch.sampling)
        sequence = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        for start, stop in self._passes(batch):
            rows = np.flatnonzero((batch.logits_rows >= start) & (batch.logits_rows < stop))
            # Rows of one token share its logits, which are computed once.
            tokens, token_of = np.unique(batch.logits_rows[rows] - start, return_inverse=True)
            logits = decoder.forward(
                batch.token_ids[start:stop],
                batch.positions[start:stop],
                [table[sequence[start:stop]] for table in (batch.block_tables, *batch.window_tables)],
                tokens,
                None if batch.state_slots is None else batch.state_slots[sequence[start:stop]],
                None if batch.adapters is None else batch.adapters[sequence[start:stop]],
                media=_media(batch, start, stop),
                rope_positions=None if batch.rope_positions is None else batch.rope_positions[:, start:stop],
                visible_until=None if batch.visible_until is None else batch.visible_until[start:stop],
            )
            if rows.size and batch.sampling.masks is not None:
                batch.sampling.masks.wait()
            for row, token in zip(rows.tolist(), token_of.tolist(), strict=True):
                sample_row(logits[token], batch.sampling, row, output)
        return output

    def _passes(self, batch: StepBatch) -> Iterator[tuple[int, int]]:
        """The tokens `[start, stop)` that go through the decoder together."""
        count = len(batch.token_ids)
        seen = np.arange(1, count + 1)  # in the batch, the end of what each token sees
        if batch.visible_until is not None:
            seen += batch.visible_until - batch.positions - 1
        start = 0
        while start < count:
            stop = min(start + self.tokens_per_pass, count)
            while (end := int(seen[start:stop].max())) > stop:
                stop = end
            yield start, stop
            start = stop

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._loaded().copy_blocks(pairs, group)

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy recurrent state between slots, `pairs[i] = (from, to)`, shape [N, 2], one after the other."""
        self._loaded().copy_states(pairs)

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter."""
        self._loaded().loras.load(number, adapter)

    def drop_lora(self, number: int) -> None:
        """Forget an adapter."""
        self._loaded().loras.drop(number)

    def close_with(self, tower: TowerExecutor) -> None:
        """Close a tower with this one."""
        self._towers.append(tower)

    def close(self) -> None:
        """Free weights and cache. Calling it twice is allowed."""
        self._decoder = None
        for tower in self._towers:
            tower.close()

    def _loaded(self) -> TorchDecoder:
        if self._decoder is None:
            raise DeviceError("this executor was closed")
        return self._decoder


def _media(batch: StepBatch, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.float32], list[int]] | None:
    """Which of the tokens `[start, stop)` have rows of media, these rows, and the layers that they add to."""
    if batch.media_rows is None or batch.media_index is None:
        return None
    index = batch.media_index[start:stop]
    places = np.flatnonzero(index >= 0)
    layers = [] if batch.media_layers is None else batch.media_layers.tolist()
    return (places.astype(np.int32), batch.media_rows[index[places]], layers) if places.size else None
