"""The way of a launch's inputs to the device, and of its results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Padding(NamedTuple):
    """What padding names: a block of each cache group, a row of hidden states, a slot of recurrent state."""

    blocks: Sequence[int]
    row: int
    state: int


class StagedTokens(NamedTuple):
    """The inputs of a launch: S sequences, Q tokens each, G cache groups with tables of W blocks.

    `token_ids`, `positions` and `rows` of hidden states are `[S, Q]`, `slots` of caches `[G, S, Q]`, and `tables [G, S,
    W]`. Of each sequence `[S]` there are its slot of recurrent state, how many of its tokens are not padding, and the
    slot of its adapter.
    """

    token_ids: Any
    positions: Any
    rows: Any
    slots: Any
    tables: Any
    state_slots: Any
    lengths: Any
    adapters: Any


def num_inputs(bucket: Bucket, num_groups: int) -> int:
    """How many values `pack` gives."""
    return (3 + num_groups) * bucket.num_tokens + num_groups * bucket.batch_size * bucket.width + 3 * bucket.batch_size


def unpack(staged: Tensor, num_sequences: int, query_len: int, width: int, num_groups: int) -> StagedTokens:
    """The inputs of a launch on the device, as int64."""
    return _parts(staged.long(), Bucket(num_sequences, query_len, width), num_groups)


def pack(
    batch: StepBatch,
    token_ids: NDArray[np.int32],
    adapters: NDArray[np.int32],
    sequences: NDArray[np.intp],
    bucket: Bucket,
    token_rows: NDArray[np.int32],
    padding: Padding,
    block_size: int,
) -> NDArray[np.int32]:
    """The inputs of `GraphDecoder.forward` for some sequences of a batch, padded to a bucket.

    `token_ids [T]` take the place of the batch's. `adapters` are the slots of all its sequences' adapters. `token_rows
    [T]` are the rows of hidden states that the batch's tokens write. K and V of padding go to each group's padding
    block, which unused entries of the tables name too.
    """
    Q, W = bucket.query_len, bucket.width
    count = len(sequences)
    start = batch.query_start[sequences, None]
    lengths = batch.query_start[sequences + 1, None] - start
    column = np.arange(Q, dtype=np.int32)
    # Padding behind a sequence's tokens repeats the last one, so that it sees nothing which that one does not see: what
    # a window has left behind may be NaN.
    token = start + np.minimum(column, lengths - 1)
    is_real = column < lengths
    positions = batch.positions[token]
    packed, staged = _padded(bucket, padding, block_size)
    staged.token_ids[:count] = token_ids[token]
    staged.positions[:count] = positions
    staged.rows[:count][is_real] = token_rows[token[is_real]]
    width = min(W, batch.block_tables.shape[1])
    for group, table in enumerate((batch.block_tables, *batch.window_tables)):
        slots = table[sequences[:, None], positions // block_size] * block_size + positions % block_size
        staged.slots[group, :count][is_real] = slots[is_real]
        staged.tables[group, :count, :width] = table[sequences, :width]
    if batch.state_slots is not None:
        staged.state_slots[:count] = batch.state_slots[sequences]
    staged.lengths[:count] = lengths[:, 0]
    staged.adapters[:count] = adapters[sequences]
    return packed


def pack_padding(bucket: Bucket, padding: Padding, block_size: int) -> NDArray[np.int32]:
    """The same inputs of a launch that is all padding."""
    return _padded(bucket, padding, block_size)[0]


def _padded(bucket: Bucket, padding: Padding, block_size: int) -> tuple[NDArray[np.int32], StagedTokens]:
    packed = np.zeros(num_inputs(bucket, len(padding.blocks)), np.int32)
    staged = _parts(packed, bucket, len(padding.blocks))
    staged.rows[:] = padding.row
    staged.state_slots[:] = padding.state
    for group, block in enumerate(padding.blocks):
        staged.slots[group] = block * block_size
        staged.tables[group] = block
    return packed, staged


def _parts(values: Any, bucket: Bucket, num_groups: int) -> StagedTokens:
    """Views of an array of numpy or of torch."""
    S, Q, W = bucket
    tables, sequences = (3 + num_groups) * S * Q, (3 + num_groups) * S * Q + num_groups * S * W
    of_tokens, of_sequences = values[:tables].reshape(3 + num_groups, S, Q), values[sequences:].reshape(3, S)
    return StagedTokens(
        of_tokens[0],
        of_tokens[1],
        of_tokens[2],
        of_tokens[3:],
        values[tables:sequences].reshape(num_groups, S, W),
        of_sequences[0],
        of_sequences[1],
        of_sequences[2],
    )
