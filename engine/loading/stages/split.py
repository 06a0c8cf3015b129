"""Which stage has which layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Final

from msgspec import Struct

from ...errors import ModelError
from ...models.spec import (
    DecoderSpec,
    StageSpec,
    held_bytes_of,
    layer_bytes_of,
    stage_cuts,
    stage_tensors,
    tensor_shapes,
)
from ...weights.quantization import TensorFormat

BESIDE_WEIGHTS: Final = 8
"""The weights' size divided by this is left free beside them, for a KV cache whose size was not given."""


class StageRoom(Struct, frozen=True):
    """The memory that each stage may take, None where it is not a stage's own, and what is wanted beside the weights.

    What is beside them, in all stages together, goes to each by its share of the weights.
    """

    bytes: Sequence[int | None]
    beside: int


def split_as_asked(spec: DecoderSpec, asked: Sequence[int]) -> list[StageSpec]:
    """The stages, in order, with `asked` layers each. Raises ModelError if the model cannot be split so."""
    num_layers, cuts = len(spec.layers), stage_cuts(spec)
    if sum(asked) != num_layers:
        raise ModelError(
            f"--pipeline-split {','.join(map(str, asked))} names {sum(asked)} layers, and the model has {num_layers}"
        )
    ends = list(accumulate(asked))
    if wrong := [end for end in ends[:-1] if end not in cuts]:
        raise ModelError(
            f"a stage cannot begin with layer {wrong[0]}: it or a later layer reads the K and V of an earlier one; "
            f"stages can begin with {_in_words(cuts)}"
        )
    return _stages(ends)


def split_layers(
    spec: DecoderSpec,
    num_stages: int,
    formats: Mapping[str, TensorFormat],
    slowness: Sequence[float] | None = None,
    room: StageRoom | None = None,
) -> list[StageSpec]:
    """The stages, in order, so that the slowest takes as little time as can be to read its weights.

    `slowness` is how long each of them takes for the same bytes; None: all as long. A cut that leaves each the `room`
    that it needs is preferred; where none does, the one that comes nearest to it is taken. Raises ModelError if the
    model cannot be split so often.
    """
    cuts = stage_cuts(spec)
    if num_stages > len(cuts) + 1:
        raise ModelError(
            f"--pipeline-parallel-size {num_stages} is more than the {len(cuts) + 1} stages that the model can be "
            f"split into: its stages can begin with {_in_words([0, *cuts])}"
        )
    sizes = {name: _num_bytes(name, shape, formats) for name, shape in tensor_shapes(spec).items()}
    read = [0, *accumulate(layer_bytes_of(spec, sizes))]
    held = [0, *accumulate(held_bytes_of(spec, sizes))]
    whole = max(held[-1], 1)

    def fullness(stage: int, begin: int, end: int) -> float:
        """What a stage would take, divided by the memory that it may take."""
        available = None if room is None else room.bytes[stage]
        if room is None or available is None:
            return 0.0
        return (held[end] - held[begin]) * (1 + room.beside / whole) / max(available, 1)

    def seconds(stage: int, begin: int, end: int) -> float:
        """In some unit; without end if it has not the room."""
        if fullness(stage, begin, end) > 1:
            return math.inf
        return (read[end] - read[begin]) * (1.0 if slowness is None else slowness[stage])

    places = [*cuts, len(spec.layers)]
    ends = _best_ends(seconds, places, num_stages) or _best_ends(fullness, places, num_stages)
    assert ends is not None
    return _stages(ends)


def stage_bytes(spec: DecoderSpec, stage: StageSpec, formats: Mapping[str, TensorFormat]) -> int:
    """What a stage's weights take in memory."""
    shapes = tensor_shapes(spec)
    return sum(_num_bytes(name, shapes[name], formats) for name in stage_tensors(spec, stage))


def max_layers(spec: DecoderSpec, formats: Mapping[str, TensorFormat], room: int) -> int:
    """How many consecutive layers a stage can have, of several, whose weights take no more than `room`, in bytes."""
    sizes = {name: _num_bytes(name, shape, formats) for name, shape in tensor_shapes(spec).items()}
    held = [0, *accumulate(held_bytes_of(spec, sizes))]
    whole = (0, len(spec.layers))
    spans = [span for span in combinations([0, *stage_cuts(spec), len(spec.layers)], 2) if span != whole]
    return max((end - begin for begin, end in spans if held[end] - held[begin] <= room), default=0)


def _num_bytes(name: str, shape: tuple[int, ...], formats: Mapping[str, TensorFormat]) -> int:
    return formats.get(name, TensorFormat("float32")).num_bytes(shape)


def _stages(ends: Sequence[int]) -> list[StageSpec]:
    return [StageSpec(begin, end, ends[-1]) for begin, end in pairwise([0, *ends])]


def _best_ends(cost: Callable[[int, int, int], float], places: Sequence[int], num_stages: int) -> list[int] | None:
    """Where stages end, of `places`, so that the largest `cost` of a stage from `begin` to `end` is smallest.

    Of equals, those whose first stages are small; None if the cost of each split is infinite.
    """
    # best[place]: the largest cost of a split of all layers before it, and the ends of its stages.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for end in places:
            options = [
                (max(largest, cost(stage, begin, end)), [*ends, end])
                for begin, (largest, ends) in best.items()
                if begin < end
            ]
            following[end] = min(options, default=(math.inf, []))
        best = {end: found for end, found in following.items() if found[0] < math.inf}
    return best[places[-1]][1] if places[-1] in best else None


def _in_words(layers: Sequence[int]) -> str:
    return f"layers {', '.join(map(str, layers))}" if layers else "only the first layer"
