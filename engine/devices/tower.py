"""The contract of towers: TowerExecutor runs the parts of a TowerSpec, piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..declaring.record import record
from ..models.spec import AttentionSpec, CrossAttentionSpec, LayerSpec, TowerSpec, mixers
from ..weights.dtypes import DType
from ..weights.lora import LoraAdapter
from ..weights.quantization import Quantization
from .executor import Executor

Rows = NDArray[np.float32]


@record(frozen=True, slots=True)
class TowerOptions:
    """How a tower is loaded: its weights and K and V in `dtype`, or matrices of layers as `quantization` says.
    Without one, matrices that are quantized keep their format, unless `keeps_quantized` is False.

    `max_rows` is the most that a segment of a layer may have. Without an executor beside it, a tower has `threads` of
    its own; None: as many as an executor would have. Segments may have one of the `adapters`, which are of matrices of
    its layers. Raises ValueError if rows or threads are 0.
    """

    dtype: DType
    max_rows: int
    quantization: Quantization | None = None
    threads: int | None = 1
    keeps_quantized: bool = True
    adapters: Sequence[LoraAdapter] = ()

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError("a segment must have room for a row")
        if self.threads is not None and self.threads < 1:
            raise ValueError("a tower needs a thread")


class TowerExecutor(ABC):
    """A tower's weights on a device, beside the model's executor and on its threads, which is idle meanwhile.

    `project`, `layer`, `layers` and `attend` are generators: they yield after pieces of about `piece_s` seconds, so
    that the caller may do something else in between, and run other rows unless the tower `is_within_layer`. The caller
    may change `piece_s` between any two pieces. Whatever the pieces, the bits of the results are the same, and those of
    a segment depend on that segment alone. Everything is called on the engine thread. A tower on threads of its own is
    called by one thread at a time.
    """

    spec: TowerSpec
    piece_s: float = 0.005

    @abstractmethod
    def project(self, name: str, rows: Rows) -> Generator[None, None, Rows]:
        """The projection `name` of `rows [N, inputs]`: `[N, outputs]`, float32. Raises ValueError for other shapes."""

    @abstractmethod
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
        """Layer `index` of `rows [N, hidden]`: as many rows. With `in_place` they may lie where `rows` do. If only the
        rows `read`, in ascending order, are read, the others may be of an earlier layer.

        Segment s owns rows `[segments[s], segments[s + 1])` and sees nothing else: `segments [S + 1]` begins with 0
        and ends with N. `positions [A, N]` are those of each of rope's axes; without rope there are none. Of the rows
        of segment s, only the first `seen[s]` are seen, by themselves and by those behind them; None: all.
        `adapters [S]` are the numbers of the segments' adapters; -1, or no array: none. Raises ValueError for arrays
        that do not fit, and for a segment of more than `max_rows`.
        """

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
        """All layers, one after the other: see `layer`. Only the rows `read` of the last one are read."""
        count = len(self.spec.layers)
        for index in range(count):
            rows = yield from self.layer(
                index,
                rows,
                segments,
                positions,
                seen=seen,
                in_place=in_place or index > 0,
                adapters=adapters,
                read=read if index == count - 1 else None,
            )
        return rows

    @property
    def is_within_layer(self) -> bool:
        """Whether a layer or cross attention is under way that keeps rows on the device: no others can be computed."""
        return False

    def share_threads(self, beside: Executor) -> bool:
        """Move a tower with threads of its own to those of `beside`, which closes it; whether that can be.

        Both must be idle.
        """
        return False

    def use_threads(self, threads: object) -> bool:
        """Compute with these threads from now on: see Executor."""
        return False

    def release_scratch(self) -> None:
        """Give all memory but that of the weights back to the system, until the next call.

        A layer that is under way keeps it.
        """
        return

    @abstractmethod
    def attend(self, name: str, queries: Rows, keys: Rows, values: Rows) -> Generator[None, None, Rows]:
        """The cross attention `name`, head by head: `[Q, W]` of `queries [Q, W]`, `keys [K, W]` and `values [K, W]`.

        W is the width of all heads. Raises ValueError for other shapes, and for more than `max_rows` keys.
        """

    @abstractmethod
    def table(self, name: str) -> Rows:
        """One of the spec's tables, in float32."""

    @property
    def is_writing(self) -> bool:
        """See Executor."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Free the weights. Calling it twice is allowed."""


def checked_rows(rows: Rows, width: int) -> Rows:
    """The rows, contiguous and in float32. Raises ValueError unless they are `[N, width]`."""
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"rows must have the shape [N, {width}], not {list(rows.shape)}")
    return np.ascontiguousarray(rows, np.float32)


def checked_attention(
    spec: TowerSpec, name: str, rows: tuple[Rows, Rows, Rows], max_rows: int
) -> tuple[CrossAttentionSpec, Rows, Rows, Rows]:
    """The cross attention of that name, and queries, keys and values as `checked_rows` gives them.

    Raises ValueError for a name that is not the spec's, and for no keys, too many, or not as many values.
    """
    attention = dict(spec.cross_attentions).get(name)
    if attention is None:
        raise ValueError(f"the tower has no cross attention {name}")
    queries, keys, values = (checked_rows(one, attention.width) for one in rows)
    if not 0 < len(keys) <= max_rows or len(values) != len(keys):
        raise ValueError(f"there must be 1 to {max_rows} keys and as many values, not {len(keys)} and {len(values)}")
    return attention, queries, keys, values


def check_segments(segments: NDArray[np.int32], num_rows: int, max_rows: int) -> NDArray[np.int32]:
    """The segments' lengths.

    Raises ValueError unless all of the rows are in segments, one behind the other, of 1 to `max_rows` each.
    """
    if segments.ndim != 1 or len(segments) == 0 or segments[0] != 0 or segments[-1] != num_rows:
        raise ValueError(f"segments must begin with 0 and end with the number of rows, {num_rows}")
    lengths = segments[1:] - segments[:-1]
    if lengths.min(initial=1) < 1:
        raise ValueError("every segment must have a row")
    if lengths.max(initial=0) > max_rows:
        raise ValueError(f"a segment has {lengths.max()} rows, and there is room for {max_rows}")
    return lengths


def check_seen(spec: TowerSpec, segments: NDArray[np.int32], seen: NDArray[np.int32] | None) -> None:
    """Raises ValueError unless a row or more of each segment is seen, and those that are not are within each reach."""
    if seen is None:
        return
    lengths = np.diff(segments)
    if seen.shape != lengths.shape or seen.min(initial=1) < 1 or (seen > lengths).any():
        raise ValueError("of each segment, a row or more must be seen, and not more than it has")
    if spec.reach is not None and (lengths - seen).max(initial=0) >= spec.reach:
        raise ValueError(f"no more rows of a segment may be unseen than a row sees ahead, {spec.reach - 1}")


def check_adapters(segments: NDArray[np.int32], adapters: NDArray[np.int32] | None) -> None:
    """Raises ValueError unless every segment has the number of an adapter, or -1."""
    if adapters is not None and adapters.shape != (len(segments) - 1,):
        raise ValueError(f"adapters must have the shape [{len(segments) - 1}], not {list(adapters.shape)}")


def checked_positions(
    axes: Sequence[int], index: int | None, positions: NDArray[np.int32] | None, num_rows: int
) -> NDArray[np.int32] | None:
    """The positions for layer `index`, or for all layers; None if nothing is turned. `axes` are `rope_axes` of all.

    Raises ValueError for a layer that there is not, and unless each row has a position on each of the tower's axes.
    """
    if index is not None and not 0 <= index < len(axes):
        raise ValueError(f"the tower has no layer {index}")
    if max(axes) == 0 or (index is not None and axes[index] == 0):
        return None
    if positions is None or positions.ndim != 2 or positions.shape[1] != num_rows or len(positions) < max(axes):
        shape = None if positions is None else list(positions.shape)
        raise ValueError(f"positions must have the shape [{max(axes)}, {num_rows}], not {shape}")
    return np.asarray(positions, np.int32)


def rope_axes(layer: LayerSpec) -> int:
    """How many axes the rope of a layer has; 0: it has no rope."""
    ropes = [mixer.rope for mixer in mixers(layer) if isinstance(mixer, AttentionSpec)]
    return max((1 + max(rope.axes, default=0) for rope in ropes if rope is not None), default=0)
