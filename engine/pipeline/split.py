"""Which stage has which layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from ..errors import ModelError
from ..models.spec import DecoderSpec, StageSpec, layer_bytes_of, stage_cuts, stage_tensors, tensor_shapes
from ..weights.quantization import TensorFormat


def split_layers(
    spec: DecoderSpec, num_stages: int, formats: Mapping[str, TensorFormat], asked: Sequence[int] | None = None
) -> list[StageSpec]:
    """The stages, in order: as `asked`, in layers, else so that the largest reads as few bytes of weights as can be.

    Raises ModelError if the model cannot be split so.
    """
    num_layers, cuts = len(spec.layers), stage_cuts(spec)
    if asked is not None:
        if sum(asked) != num_layers:
            raise ModelError(
                f"--pipeline-split {','.join(map(str, asked))} names {sum(asked)} layers, and the model has "
                f"{num_layers}"
            )
        ends = list(accumulate(asked))
        if wrong := [end for end in ends[:-1] if end not in cuts]:
            raise ModelError(
                f"a stage cannot begin with layer {wrong[0]}: it or a later layer reads the K and V of an earlier one; "
                f"stages can begin with {_in_words(cuts)}"
            )
    else:
        if num_stages > len(cuts) + 1:
            raise ModelError(
                f"--pipeline-parallel-size {num_stages} is more than the {len(cuts) + 1} stages that the model can be "
                f"split into: its stages can begin with {_in_words([0, *cuts])}"
            )
        sizes = {name: _num_bytes(name, shape, formats) for name, shape in tensor_shapes(spec).items()}
        ends = _even_ends(layer_bytes_of(spec, sizes), cuts, num_stages)
    return [StageSpec(begin, end, num_layers) for begin, end in pairwise([0, *ends])]


def stage_bytes(spec: DecoderSpec, stage: StageSpec, formats: Mapping[str, TensorFormat]) -> int:
    """What a stage's weights take in memory."""
    shapes = tensor_shapes(spec)
    return sum(_num_bytes(name, shapes[name], formats) for name in stage_tensors(spec, stage))


def _num_bytes(name: str, shape: tuple[int, ...], formats: Mapping[str, TensorFormat]) -> int:
    return formats.get(name, TensorFormat("float32")).num_bytes(shape)


def _even_ends(sizes: Sequence[int], cuts: Sequence[int], num_stages: int) -> list[int]:
    """Where stages end so that the largest is as small as can be; of equals, those whose first stages are small."""
    starts = [0, *accumulate(sizes)]
    places = [*cuts, len(sizes)]
    # best[place]: the largest stage of a split of all layers before it, and the ends of its stages.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for end in places:
            options = [
                (max(largest, starts[end] - starts[begin]), [*ends, end])
                for begin, (largest, ends) in best.items()
                if begin < end
            ]
            following[end] = min(options, default=(math.inf, []))
        best = {end: found for end, found in following.items() if found[0] < math.inf}
    return best[len(sizes)][1]


def _in_words(layers: Sequence[int]) -> str:
    return f"layers {', '.join(map(str, layers))}" if layers else "no layer but the first"
