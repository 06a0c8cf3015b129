"""A tower in the native runtime, on the threads of the model beside it or on its own."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import nullcontext
from math import prod

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...models.spec import AttentionSpec, TowerSpec, mixers, tower_shapes
from ...weights.dtypes import STORAGE
from ...weights.finite import require_finite
from ...weights.packed_cache import BackgroundWrite, PackedCache
from ...weights.tensor import WeightSource, to_float32
from ..cache_split import BLOCK_TOKENS
from ..executor import Executor
from ..load_plan import weight_bytes
from ..tower import (
    Rows,
    TowerExecutor,
    TowerOptions,
    check_adapters,
    check_seen,
    check_segments,
    checked_attention,
    checked_positions,
    checked_rows,
    rope_axes,
)
from .executor import CpuExecutor
from .formats import Formats
from .lowering import lower_tower
from .pace import Pace
from .weights import set_weights

_MOST_ROWS = 1024  # of a piece
_SECONDS_ALONE = 0.1  # that a piece takes where no model waits for the threads
_FLOAT_BYTES = 4


class CpuTower(TowerExecutor):
    """A tower in the native runtime. Layers keep their queries, K and V in memory for a segment of `max_rows`."""

    def __init__(
        self,
        spec: TowerSpec,
        native: _native.Tower,
        tables: Mapping[str, Rows],
        max_rows: int,
        threads: int,
        write: BackgroundWrite | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.spec = spec
        self._axes = [rope_axes(layer) for layer in spec.layers]
        self._write = write
        self._native: _native.Tower | None = native
        self._tables = dict(tables)
        self._max_rows = max_rows
        self._is_between_turns = False
        if alone:
            self.piece_s = _SECONDS_ALONE
        most = _piece_rows(spec, max_rows, alone=alone)
        self._projections = {
            name: (projection, Pace(most, 2 * projection.inputs * projection.outputs, threads))
            for name, projection in spec.projections
        }
        operations = [2 * _num_weights(spec, index) for index in range(len(spec.layers))]
        largest = max(operations, default=0)
        self._run, self._remember, self._finish = (Pace(most, largest, threads) for _ in range(3))
        self._all = Pace(most, sum(operations), threads)
        self._paces = {
            name: (Pace(most, 4 * attention.width, threads), Pace(most, 4 * attention.width * max_rows, threads))
            for name, attention in spec.cross_attentions
        }

    @property
    def native(self) -> _native.Tower:
        """The runtime itself. Raises DeviceError after `close`."""
        if self._native is None:
            raise DeviceError("this tower was closed")
        return self._native

    def project(self, name: str, rows: Rows) -> Generator[None, None, Rows]:
        """See TowerExecutor."""
        native = self.native
        if name not in self._projections:
            raise ValueError(f"the tower has no projection {name}")
        projection, pace = self._projections[name]
        rows = checked_rows(rows, projection.inputs)
        out = np.empty((len(rows), projection.outputs), np.float32)
        begin = 0
        while begin < len(rows):
            end = begin + pace.next_piece(len(rows) - begin, self.piece_s)
            with pace.piece(end - begin):
                native.project(name, rows[begin:end], out[begin:end])
            yield
            begin = end
        return out

    def layer(
        self,
        index: int,
        rows: Rows,
        segments: NDArray[np.int32],
        positions: NDArray[np.int32] | None = None,
        *,
        seen: NDArray[np.int32] | None = None,
        in_place: bool = False,
        adapters: NDArray[np.int32] | None = None,
        read: NDArray[np.int32] | None = None,
    ) -> Generator[None, None, Rows]:
        """See TowerExecutor. Segments are computed together as long as they fit a piece."""
        native = self.native
        if self._is_between_turns:
            raise RuntimeError("another layer is under way")
        out = checked_rows(rows, self.spec.hidden_size)
        if not in_place:
            out = out.copy()
        check_segments(segments, len(out), self._max_rows)
        check_seen(self.spec, segments, seen)
        check_adapters(segments, adapters)
        positions = checked_positions(self._axes, index, positions, len(out))
        starts = np.asarray(segments, np.int32)
        first = 0
        while first + 1 < len(starts):
            last = self._last_of_piece(starts, first, native.num_blocks)
            begin, end = int(starts[first]), int(starts[last])
            own, read_here = _entries(adapters, first, last), _within(read, begin, end)
            if read_here is not None and not len(read_here):
                first = last
                continue
            if end - begin > self._run.rows(self.piece_s):
                yield from self._in_turns(
                    index, out[begin:end], _columns(positions, begin, end), _entries(seen, first, last), own, read_here
                )
            else:
                # Of a layer of which little is computed, the time tells nothing of others.
                with self._run.piece(end - begin) if read_here is None else nullcontext():
                    native.run(
                        index,
                        index + 1,
                        out[begin:end],
                        starts[first : last + 1] - starts[first],
                        np.diff(starts[first : last + 1]),
                        _columns(positions, begin, end),
                        _entries(seen, first, last),
                        own,
                        read_here,
                    )
                yield
            first = last
        return out

    def layers(
        self,
        rows: Rows,
        segments: NDArray[np.int32],
        positions: NDArray[np.int32] | None = None,
        *,
        seen: NDArray[np.int32] | None = None,
        in_place: bool = False,
        adapters: NDArray[np.int32] | None = None,
        read: NDArray[np.int32] | None = None,
    ) -> Generator[None, None, Rows]:
        """See TowerExecutor. A few rows go through all layers in one piece."""
        native, count, starts = self.native, len(self.spec.layers), np.asarray(segments, np.int32)
        if not 0 < len(rows) <= self._all.rows(self.piece_s) or not count or _num_blocks(starts) > native.num_blocks:
            every = super().layers(rows, starts, positions, seen=seen, in_place=in_place, adapters=adapters, read=read)
            return (yield from every)
        if self._is_between_turns:
            raise RuntimeError("another layer is under way")
        out = checked_rows(rows, self.spec.hidden_size)
        if not in_place:
            out = out.copy()
        lengths = check_segments(starts, len(out), self._max_rows)
        check_seen(self.spec, starts, seen)
        check_adapters(starts, adapters)
        positions = checked_positions(self._axes, None, positions, len(out))
        seen, adapters = (_entries(entries, 0, len(starts) - 1) for entries in (seen, adapters))
        with self._all.piece(len(out)):
            native.run(0, count, out, starts, lengths, positions, seen, adapters, read)
        yield
        return out

    @property
    def is_within_layer(self) -> bool:
        """See TowerExecutor."""
        return self._is_between_turns

    def share_threads(self, beside: Executor) -> bool:
        """See TowerExecutor. The executor must have as many threads in as many groups."""
        if not isinstance(beside, CpuExecutor) or not self.native.use_threads(beside.native.threads):
            return False
        beside.close_with(self)
        return True

    def use_threads(self, threads: object) -> bool:
        """See TowerExecutor."""
        return isinstance(threads, _native.ThreadPool) and self.native.use_threads(threads)

    def attend(self, name: str, queries: Rows, keys: Rows, values: Rows) -> Generator[None, None, Rows]:
        """See TowerExecutor. All keys and values come first, then the queries, some of either at a time."""
        native = self.native
        if self._is_between_turns:
            raise RuntimeError("another layer is under way")
        rows = queries, keys, values
        attention, queries, keys, values = checked_attention(self.spec, name, rows, self._max_rows)
        width, count = attention.width, len(keys)
        of_keys, of_queries = self._paces[name]
        out = np.empty_like(queries)
        self._is_between_turns = True
        try:
            begin = 0
            while begin < count:
                end = begin + of_keys.next_piece(count - begin, self.piece_s)
                piece = np.zeros((end - begin, 3 * width), np.float32)
                piece[:, width : 2 * width], piece[:, 2 * width :] = keys[begin:end], values[begin:end]
                with of_keys.piece(end - begin):
                    native.remember_keys(name, piece, count, begin)
                yield
                begin = end
            begin = 0
            while begin < len(queries):
                end = begin + of_queries.next_piece(len(queries) - begin, self.piece_s)
                piece = np.zeros((end - begin, 3 * width), np.float32)
                piece[:, :width] = queries[begin:end]
                with of_queries.piece(end - begin):
                    native.attend(name, piece, count, out[begin:end])
                yield
                begin = end
        finally:
            self._is_between_turns = False
        return out

    def table(self, name: str) -> Rows:
        """See TowerExecutor. Raises ValueError for a name that is not the spec's."""
        if name not in self._tables:
            raise ValueError(f"the tower has no table {name}")
        return self._tables[name]

    def release_scratch(self) -> None:
        """See TowerExecutor."""
        if self._native is not None and not self._is_between_turns:
            self._native.release_scratch()

    @property
    def is_writing(self) -> bool:
        """See TowerExecutor."""
        return self._write is not None and self._write.is_running

    def close(self) -> None:
        """Free the weights. Calling it twice is allowed."""
        if self._write is not None:
            self._write.cancel()
        self._native = None
        self._tables = {}

    def _last_of_piece(self, starts: NDArray[np.int32], first: int, num_blocks: int) -> int:
        """The end of the segments from `first` on that fit a piece; it has at least one, whether that fits or not."""
        last, blocks, most = first, 0, self._run.rows(self.piece_s)
        while last + 1 < len(starts):
            blocks += -(-int(starts[last + 1] - starts[last]) // BLOCK_TOKENS)
            if last > first and (blocks > num_blocks or starts[last + 1] - starts[first] > most):
                break
            last += 1
        return last

    def _in_turns(
        self,
        index: int,
        rows: Rows,
        positions: NDArray[np.int32] | None,
        seen: NDArray[np.int32] | None,
        adapters: NDArray[np.int32] | None,
        read: NDArray[np.int32] | None,
    ) -> Generator[None, None, None]:
        """A segment that is longer than a piece, in place: first the queries, K and V of all rows, then the rest of
        those that are read.
        """
        native, lengths, is_kept = self.native, np.array([len(rows)], np.int32), False
        whole = [(0, len(rows))]
        runs = whole if read is None else _runs(read)
        try:
            for pace, remembered, parts in ((self._remember, False, whole), (self._finish, True, runs)):
                for begin, stop in parts:
                    while begin < stop:
                        end = begin + pace.next_piece(stop - begin, self.piece_s)
                        here, columns = np.array([0, end - begin], np.int32), _columns(positions, begin, end)
                        # Single rows take longer, and tell nothing of pieces.
                        with pace.piece(end - begin) if parts is whole else nullcontext():
                            compute = native.finish if remembered else native.remember
                            compute(index, rows[begin:end], here, lengths, begin, columns, seen, adapters)
                        begin = end
                        # Nothing of the segment is needed behind its last piece: before the next one, others may run.
                        is_kept = self._is_between_turns = not remembered or end < runs[-1][1]
                        yield
        finally:
            if is_kept:
                self._is_between_turns = False


def load_tower(
    spec: TowerSpec,
    weights: WeightSource,
    formats: Formats,
    options: TowerOptions,
    on: _native.Executor | tuple[str, list[list[int]]],
    cancellation: Cancellation,
    cache: PackedCache | None = None,
) -> CpuTower:
    """Pack the weights with matrices in these `formats`, to compute on the threads of an executor, or with an
    instruction set level on processors of its own.

    All but the tables are taken from a `cache` that has them, and kept there otherwise.

    Raises ValueError for what the kernels cannot compute, and what `set_weights` raises.
    """
    for adapter in options.adapters:
        for update in adapter.updates:
            if not update.name.startswith("layers.") or update.name.endswith((".pos_k", ".pos_q")):
                raise ValueError(f"a tower has no adapters of {update.name}, only of what its layers' rows go through")
    rows, alone = options.max_rows, isinstance(on, tuple)
    isa, beside, groups = (on[0], None, on[1]) if isinstance(on, tuple) else (on.isa, on, [])
    threads = sum(map(len, groups)) if beside is None else beside.num_threads
    piece = _piece_rows(spec, rows, alone=alone)
    rank = max((update.rank for adapter in options.adapters for update in adapter.updates), default=0)
    native = _native.Tower(lower_tower(spec, formats), isa, options.dtype, rows, piece, beside, groups, rank)
    tables = dict(spec.tables)
    with cancellation.calling(native.stop_loading):
        cached = cache is not None and cache.read(native)
        if not cached:
            set_weights(native, weights, formats, threads, cancellation, without=tables)
    native.check_complete()
    for number, adapter in enumerate(options.adapters):
        updates = [(f"{u.name}.weight", u.first_output, u.a, u.b, u.bias, u.scale, u.shift) for u in adapter.updates]
        native.set_adapter(number, native.pack_adapter(options.dtype, updates))
    read = {}
    for name in tables:
        tensor = weights[name]
        require_finite([tensor], threads)
        read[name] = to_float32(tensor)
    write = BackgroundWrite(cache, native) if cache is not None and not cached else None
    return CpuTower(spec, native, read, rows, threads, write, alone=alone)


def tower_bytes(spec: TowerSpec, formats: Formats, options: TowerOptions) -> int:
    """About how many bytes a tower takes with a segment of `max_rows`, which its caller has twice in float32."""
    kept = 0  # queries, K and V
    all_mixers = [mixer for layer in spec.layers for mixer in mixers(layer)]
    attentions = [mixer for mixer in all_mixers if isinstance(mixer, AttentionSpec)]
    heads = [(one.num_heads, one.num_kv_heads, one.head_dim) for one in attentions]
    heads += [(one.num_heads, one.num_heads, one.head_dim) for _, one in spec.cross_attentions]
    for num_heads, num_kv_heads, head_dim in heads:
        block = _native.kv_bytes_per_block(num_kv_heads, head_dim, head_dim, False, options.dtype)
        a_row = block // BLOCK_TOKENS
        kept = max(kept, a_row + a_row * num_heads // (2 * num_kv_heads))
    widths = [2 * (projection.inputs + projection.outputs) for _, projection in spec.projections]
    widths += [residual.mixer.activations + spec.hidden_size for layer in spec.layers for residual in layer]
    widths += [2 * 3 * attention.width for _, attention in spec.cross_attentions]
    piece = _piece_rows(spec, options.max_rows) * max(widths, default=0) * _FLOAT_BYTES
    image = options.max_rows * 2 * spec.hidden_size * _FLOAT_BYTES
    # What positions add to scores: of a segment, or of a piece of many, and of the keys of a block behind it.
    most_rows = max(options.max_rows, _piece_rows(spec, options.max_rows, alone=True)) + BLOCK_TOKENS
    positions = most_rows * max(map(_position_bytes, attentions), default=0)
    updates = [update for adapter in options.adapters for update in adapter.updates]
    adapters = STORAGE[options.dtype].itemsize * sum(update.a.size + update.b.size for update in updates)
    return weight_bytes(tower_shapes(spec), formats) + options.max_rows * kept + positions + piece + image + adapters


def _piece_rows(spec: TowerSpec, max_rows: int, *, alone: bool = False) -> int:
    """At most a segment; alone, where many segments come at once, always as many."""
    all_mixers = [mixer for layer in spec.layers for mixer in mixers(layer)]
    # With positions in its scores a row takes many times the memory.
    wide = any(isinstance(mixer, AttentionSpec) and _position_bytes(mixer) for mixer in all_mixers)
    most = _MOST_ROWS // 2 if wide else _MOST_ROWS
    return most if alone else min(most, -(-max_rows // BLOCK_TOKENS) * BLOCK_TOKENS)


def _position_bytes(attention: AttentionSpec) -> int:
    """Of a row's products with the tables of disentangled attention."""
    positions = attention.disentangled
    if positions is None:
        return 0
    return attention.num_heads * positions.num_rows * len(positions.tables) * _FLOAT_BYTES


def _num_blocks(starts: NDArray[np.int32]) -> int:
    return int((-(-(starts[1:] - starts[:-1]) // BLOCK_TOKENS)).sum())


def _num_weights(spec: TowerSpec, index: int) -> int:
    return sum(prod(shape) for residual in spec.layers[index] for shape in residual.shapes(spec.hidden_size).values())


def _columns(positions: NDArray[np.int32] | None, begin: int, end: int) -> NDArray[np.int32] | None:
    return None if positions is None else np.ascontiguousarray(positions[:, begin:end])


def _within(read: NDArray[np.int32] | None, begin: int, end: int) -> NDArray[np.int32] | None:
    """Which of a piece's rows are read."""
    if read is None:
        return None
    first, last = np.searchsorted(read, (begin, end))
    return np.ascontiguousarray(read[first:last] - begin, np.int32)


def _runs(read: NDArray[np.int32]) -> list[tuple[int, int]]:
    """The rows that follow each other: where they begin, and their ends."""
    parts = np.split(read, np.flatnonzero(np.diff(read) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _entries(of_segments: NDArray[np.int32] | None, first: int, last: int) -> NDArray[np.int32] | None:
    return None if of_segments is None else np.ascontiguousarray(of_segments[first:last], np.int32)
