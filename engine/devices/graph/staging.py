"""The way of a launch's inputs to the device, and of its results back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import StepBatch
from ..bucketing import Bucket

# Intel's plug-in for vLLM says that Gaudi has no pinned memory (is_pin_memory_available in vllm_gaudi/platform.py). A
# device that is registered as PrivateUse1, like Trainium, has it only if its hooks allocate it, and AWS promises none:
# https://docs.pytorch.org/tutorials/advanced/privateuseone.html
_PINNING = ("cuda", "xpu")


class HostMemory:
    """Host memory of copies from and to the device, in pieces that stay until the step after the next one.

    It is `pinned` where the device can then copy without the host waiting for it. Without that, a copy may only be
    asked for and not waited for (`non_blocking`) where the vendor promises what comes of it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator()
        is_there = accelerator is not None and accelerator.type == device.type
        self.pinned = is_there and device.type in _PINNING
        self._dtype = dtype
        self._chunk, self._other = self._allocate(1 << 12), self._allocate(1 << 12)
        self._used = 0

    def begin_step(self) -> None:
        """From now on pieces are the next step's. The step before the last one is done."""
        self._chunk, self._other = self._other, self._chunk
        self._used = 0

    def take(self, size: int) -> Tensor:
        """A piece `[size]` that holds anything."""
        if self._used + size > len(self._chunk):
            # The chunk before lives on in its pieces.
            self._chunk, self._used = self._allocate(2 * max(size, len(self._chunk))), 0
        piece = self._chunk[self._used : self._used + size]
        self._used += size
        return piece

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self.pinned)


class Staging:
    """Where launches find their inputs on the device: one buffer for all, so that graphs always read the same place.

    Launches that are larger than `size` values have a buffer of their own.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int) -> None:
        self._host = HostMemory(dtype, device)
        self._shared = torch.zeros(size, dtype=dtype, device=device)

    def begin_step(self) -> None:
        """Begin a step. All copies of the step before the last one are done."""
        self._host.begin_step()

    def inputs(self, size: int) -> Tensor:
        """Where a launch of that many inputs reads them, `[size]`."""
        shared = self._shared
        return shared[:size] if size <= len(shared) else torch.zeros(size, dtype=shared.dtype, device=shared.device)

    def write(self, values: NDArray[np.generic], inputs: Tensor) -> None:
        """Copy `values [size]` there, behind all that the device was asked for before. They may change at once."""
        piece = self._host.take(len(values))
        piece.numpy()[:] = values
        inputs.copy_(piece, non_blocking=self._host.pinned)


def num_inputs(bucket: Bucket, num_groups: int) -> int:
    """How many values `pack` gives."""
    return (3 + num_groups) * bucket.num_tokens + num_groups * bucket.batch_size * bucket.width


def pack(
    batch: StepBatch,
    token_ids: NDArray[np.int32],
    sequences: NDArray[np.intp],
    bucket: Bucket,
    token_rows: NDArray[np.int32],
    padding_blocks: Sequence[int],
    block_size: int,
    spare_row: int,
) -> NDArray[np.int32]:
    """The inputs of `GraphDecoder.forward` for some sequences of a batch, padded to a bucket.

    `token_ids [T]` take the place of the batch's. `token_rows [T]` are the rows of hidden states that the batch's
    tokens write; padding writes `spare_row`. K and V of padding go to each group's padding block, which unused entries
    of the tables name too.
    """
    S, Q, W = bucket
    count = len(sequences)
    start = batch.query_start[sequences, None]
    lengths = batch.query_start[sequences + 1, None] - start
    column = np.arange(Q, dtype=np.int32)
    # Padding behind a sequence's tokens repeats the last one, so that it sees nothing which that one does not see: what
    # a window has left behind may be NaN.
    token = start + np.minimum(column, lengths - 1)
    is_real = column < lengths
    positions = batch.positions[token]
    tables = (batch.block_tables, *batch.window_tables)
    packed = np.zeros(num_inputs(bucket, len(tables)), np.int32)
    per_token = packed[: (3 + len(tables)) * S * Q].reshape(-1, S, Q)
    packed_tables = packed[(3 + len(tables)) * S * Q :].reshape(-1, S, W)
    per_token[0, :count] = token_ids[token]
    per_token[1, :count] = positions
    per_token[2] = spare_row
    per_token[2, :count][is_real] = token_rows[token[is_real]]
    width = min(W, batch.block_tables.shape[1])
    for group, (table, padding) in enumerate(zip(tables, padding_blocks, strict=True)):
        slots = table[sequences[:, None], positions // block_size] * block_size + positions % block_size
        per_token[3 + group] = padding * block_size
        per_token[3 + group, :count][is_real] = slots[is_real]
        packed_tables[group] = padding
        packed_tables[group, :count, :width] = table[sequences, :width]
    return packed


def pack_padding(bucket: Bucket, padding_blocks: Sequence[int], block_size: int, spare_row: int) -> NDArray[np.int32]:
    """The same inputs of a launch that is all padding."""
    S, Q, W = bucket
    packed = np.zeros(num_inputs(bucket, len(padding_blocks)), np.int32)
    per_token = packed[: (3 + len(padding_blocks)) * S * Q].reshape(-1, S, Q)
    packed_tables = packed[(3 + len(padding_blocks)) * S * Q :].reshape(-1, S, W)
    per_token[2] = spare_row
    for group, padding in enumerate(padding_blocks):
        per_token[3 + group] = padding * block_size
        packed_tables[group] = padding
    return packed
