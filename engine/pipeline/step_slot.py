"""StepSlot: the arrays of one step in memory that all stages share.

The memory is a file without a name: it is gone with the last process that has it, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..devices.batch import SamplingBatch, StepBatch, StepOutput, TokenMasks
from ..files.unnamed import unnamed_file
from .links import Part

Arrays: TypeAlias = dict[str, NDArray[Any] | None]

_ALIGNMENT = 64
_PAGE = 1 << 16
_INT: np.dtype[Any] = np.dtype(np.int32)
_FLOAT: np.dtype[Any] = np.dtype(np.float32)
_TYPES: dict[str, np.dtype[Any]] = {
    "seed": np.dtype(np.uint64),
    "masks": np.dtype(np.uint32),
    "times": np.dtype(np.float64),
}
_FLOATS = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bias_values",
    "logprob_temperature",
    "out_logprobs",
    "out_top_logprobs",
    "rows",
    "media_rows",
}
_BATCH = (
    "token_ids",
    "positions",
    "query_start",
    "context_len",
    "block_tables",
    "logits_rows",
    "state_slots",
    "num_draft_tokens",
    "adapters",
    "media_rows",
    "media_index",
    "media_layers",
    "rope_positions",
    "visible_until",
)
_SAMPLING = tuple(field.name for field in fields(SamplingBatch) if field.name != "masks")
_OUTPUT = tuple(field.name for field in fields(StepOutput))


class SlotShape(Struct, frozen=True):
    """The sizes of a pipeline's slots: cache groups, stages, and floats of a row between stages."""

    num_groups: int
    num_stages: int
    row_floats: int

    def slot(self, fd: int | None = None) -> StepSlot:
        """A slot, with `fd` in the memory of another process's slot of this shape."""
        return StepSlot(self, fd)


class StepSlot:
    """Room for one step: the batch, the rows between stages, what was sampled or drafted, and when each stage computed.

    One process `write`s a batch, and the others then `read` it.
    """

    def __init__(self, shape: SlotShape, fd: int | None = None) -> None:
        self.fd = unnamed_file() if fd is None else fd
        self._row_floats, self._num_stages = shape.row_floats, shape.num_stages
        window_tables = [f"window_tables{group}" for group in range(1, shape.num_groups)]
        names = [*_BATCH, *window_tables, *_SAMPLING, "mask_index", "counts", "masks", "times", "rows"]
        self._window_tables = window_tables
        self._names = [*names, *(f"out_{name}" for name in _OUTPUT), "draft_tokens"]
        self._dtypes: dict[str, np.dtype[Any]] = {
            name: _TYPES.get(name, _FLOAT if name in _FLOATS else _INT) for name in self._names
        }
        self._first = -(-len(self._names) * 24 // _ALIGNMENT) * _ALIGNMENT  # behind the places of all arrays
        self._memory: mmap.mmap | None = None
        self._places = np.empty((0, 3), np.int64)

    def write(self, batch: StepBatch, counts: NDArray[np.int32] | None = None) -> tuple[int, Arrays]:
        """Take a batch in, except the bits of its masks. Returns the bytes that it takes, and the arrays there.

        With `counts` [S] no stage runs it, and there is room for `counts` draft tokens of the sequences.
        """
        sampling = batch.sampling
        given: dict[str, NDArray[Any] | None] = {name: getattr(batch, name) for name in _BATCH}
        given |= {name: getattr(sampling, name) for name in _SAMPLING}
        given |= zip(self._window_tables, batch.window_tables, strict=counts is None)  # a draft model has none
        output = StepOutput.empty(sampling)
        shapes: dict[str, tuple[int, ...]] = {
            f"out_{name}": array.shape for name in _OUTPUT if (array := getattr(output, name)) is not None
        }
        shapes["rows"] = len(batch.token_ids) if counts is None else 0, self._row_floats
        shapes["times"] = self._num_stages, 3
        if sampling.masks is not None:
            given["mask_index"], shapes["masks"] = sampling.masks.index, sampling.masks.bits.shape
        if counts is not None:
            given["counts"], shapes["draft_tokens"] = counts, (len(counts), int(counts.max(initial=0)))
        shapes |= {name: array.shape for name, array in given.items() if array is not None}
        places, size = self._lay_out(shapes)
        self._map(size)
        self._places[:] = places
        arrays = self._arrays()
        for name, array in given.items():
            if (place := arrays[name]) is not None:
                place[...] = array
        times = arrays["times"]
        assert times is not None
        times[...] = 0
        return size, arrays

    def read(self, size: int) -> Arrays:
        """The arrays of a batch that takes `size` bytes."""
        self._map(size)
        return self._arrays()

    def memory(self, size: int) -> memoryview:
        """The bytes of a step that takes `size` of them."""
        return memoryview(self._map(size))

    def spans(self, part: Part, size: int) -> list[tuple[int, int]]:
        """Where a part of a step that takes `size` bytes lies, `(begin, end)`.

        Masks go with no other part, because they go to the last stage by another way, and may be there first.
        """
        begins = dict(zip(self._names, self._places[:, 0].tolist(), strict=True))
        times, rows = begins["times"], begins["rows"]
        masks = begins["masks"] or times
        outputs, draft_tokens = begins["out_token_ids"], begins["draft_tokens"]
        if part is Part.ASKED:
            return [(0, times)]
        if part is Part.DRAFTED:
            return [(draft_tokens, size)]
        if part is Part.MASKS:
            return [(masks, times)]
        if part is Part.OUTPUT:
            return [(times, rows), (outputs, size)]
        return [(0, masks), (times, outputs if part is Part.ROWS else rows)]

    def close(self) -> None:
        """Give the memory back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd, self._memory, self._places = -1, None, np.empty((0, 3), np.int64)

    def batch(self, arrays: Arrays, wait_for_masks: Any = None) -> StepBatch:
        """The batch of these arrays; `wait_for_masks` returns when the bits of its masks are written."""
        sampling = SamplingBatch(**{name: arrays[name] for name in _SAMPLING})  # type: ignore[arg-type]
        bits, index = arrays["masks"], arrays["mask_index"]
        if bits is not None and index is not None:
            sampling.masks = TokenMasks(bits, index, wait_for_masks)
        batch = StepBatch(sampling=sampling, **{name: arrays[name] for name in _BATCH})  # type: ignore[arg-type]
        batch.window_tables = tuple(arrays[name] for name in self._window_tables)  # type: ignore[misc]
        return batch

    def output(self, arrays: Arrays) -> StepOutput:
        """Where the results of these arrays' batch lie."""
        return StepOutput(**{name: arrays[f"out_{name}"] for name in _OUTPUT})  # type: ignore[arg-type]

    def _lay_out(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[NDArray[np.int64], int]:
        places, at = [], self._first
        for name in self._names:
            shape = shapes.get(name)
            if shape is None:
                places.append((0, 0, 0))
                continue
            rows, columns = shape if len(shape) == 2 else (shape[0], -1)
            places.append((at, rows, columns))
            size = rows * max(columns, 1) * self._dtypes[name].itemsize if columns else 0
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return np.array(places, np.int64), at

    def _map(self, size: int) -> mmap.mmap:
        memory = self._memory
        if memory is None or len(memory) < size:
            mapped = -(-size // _PAGE) * _PAGE
            if os.fstat(self.fd).st_size < mapped:
                os.ftruncate(self.fd, mapped)
            self._memory = memory = mmap.mmap(self.fd, mapped)
            self._places = np.ndarray((len(self._names), 3), np.int64, memory)
        return memory

    def _arrays(self) -> Arrays:
        assert self._memory is not None
        arrays: Arrays = {}
        for name, (at, rows, columns) in zip(self._names, self._places.tolist(), strict=True):
            shape = (rows,) if columns < 0 else (rows, columns)
            arrays[name] = np.ndarray(shape, self._dtypes[name], self._memory, at) if at else None
        return arrays
