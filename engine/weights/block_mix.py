"""Which of GGUF's types each matrix of a model has, where a name such as q4_k_m stands for a mix of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal, get_args

from ..declaring.record import record
from .block_types import KINDS, BlockKind

BlockMethod = Literal["int4", "q4_k_m", "q5_k_m", "q6_k", "q8_0"]
"""The mixes that weights are quantized to while they are loaded."""
BlockMix = Literal[
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "iq4_xs", "iq4_nl", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "int4", "q5_0",
    "q5_1", "q5_k_s", "q5_k_m", "q6_k", "q8_0",
]  # fmt: skip
"""The mixes that files are written in, from few bits to many."""
BLOCK_MIXES: tuple[BlockMix, ...] = get_args(BlockMix)

# Where inputs do not fill the super-blocks of a type, another takes its place: the same as in llama.cpp.
_SMALLER: dict[BlockKind, BlockKind] = {
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "iq4_xs": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
_LAYER = re.compile(r"layers\.(\d+)\.")

_Layers = Callable[[int, int], bool]  # whether layer i of n is meant


def _all(_layer: int, _count: int) -> bool:
    return True


def _spread(layer: int, count: int) -> bool:
    """The first and the last eighth, and every third of the others."""
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _first(layers: int) -> _Layers:
    return lambda layer, _count: layer < layers


def _first_part(parts: int) -> _Layers:
    """The first of as many equal parts."""
    return lambda layer, count: layer < count // parts


@record(frozen=True, slots=True)
class _Mix:
    """`base` is the type of most matrices, and `head` that of the head, or of an embedding that is the head too.

    An embedding beside a head is of type `embedding`; None: as `base`. `finer` are the matrices of layers with more
    bits: the end of their names, their type, and in which layers; the first that fits counts. `smaller` has the
    replacement of each type with super-blocks where the inputs do not fill them.
    """

    base: BlockKind
    head: BlockKind = "q6_k"
    embedding: BlockKind | None = None
    finer: tuple[tuple[str, BlockKind, _Layers], ...] = ()
    smaller: Mapping[BlockKind, BlockKind] = field(default_factory=_SMALLER.copy)


_V, _O, _DOWN = ".v.weight", ".o.weight", ".down.weight"

# Names that llama.cpp also has mean the same types as there. int4 is the mix with the least error that was found for no
# more bits than q4_k_m: values are few and matter most, and an embedding loses little with 5 bits.
_MIXES: dict[BlockMix, _Mix] = {
    "q2_k": _Mix("q2_k", finer=((_V, "q4_k", _all), (_DOWN, "q3_k", _all), (_O, "q3_k", _all))),
    "q3_k_s": _Mix("q3_k"),
    "q3_k_m": _Mix(
        "q3_k",
        finer=(
            (_V, "q5_k", _first(2)),
            (_V, "q4_k", _all),
            (_DOWN, "q5_k", _first_part(16)),
            (_DOWN, "q4_k", _spread),
            (_O, "q4_k", _all),
        ),
    ),
    "q3_k_l": _Mix("q3_k", finer=((_V, "q5_k", _all), (_DOWN, "q5_k", _all), (_O, "q5_k", _all))),
    "iq4_xs": _Mix("iq4_xs", finer=((_V, "q5_k", _all), (_DOWN, "q5_k", _first_part(8)))),
    "iq4_nl": _Mix("iq4_nl", finer=((_V, "q5_k", _all), (_DOWN, "q5_k", _first_part(8)))),
    "q4_0": _Mix("q4_0"),
    "q4_1": _Mix("q4_1"),
    "q4_k_s": _Mix("q4_k", finer=((_V, "q5_k", _first(4)), (_DOWN, "q5_k", _first_part(8)))),
    "q4_k_m": _Mix("q4_k", finer=((_V, "q6_k", _spread), (_DOWN, "q6_k", _spread))),
    "int4": _Mix(
        "q4_k",
        head="q5_k",
        embedding="q5_k",
        finer=((_V, "q6_k", _all), (_DOWN, "q6_k", _spread)),
        smaller={**_SMALLER, "q4_k": "q5_1"},
    ),
    "q5_0": _Mix("q5_0"),
    "q5_1": _Mix("q5_1"),
    "q5_k_s": _Mix("q5_k"),
    "q5_k_m": _Mix("q5_k", finer=((_V, "q6_k", _spread), (_DOWN, "q6_k", _spread))),
    "q6_k": _Mix("q6_k"),
    "q8_0": _Mix("q8_0", head="q8_0"),
}


def block_kind(mix: BlockMix, name: str, inputs: int, num_layers: int, *, tied: bool) -> BlockKind | None:
    """The type of a matrix of that name with `inputs` columns, in a model of `num_layers`; None: it stays in floats.

    `tied` says whether the embedding is the head too. Where inputs are no multiple of 256, a type with blocks of 32
    takes the place of one with super-blocks. A matrix whose inputs are no multiple of 32 stays in floats.
    """
    types = _MIXES[mix]
    kind = _kind(types, name, num_layers, tied=tied)
    if inputs % KINDS[kind].elements:
        kind = types.smaller.get(kind, kind)
    return None if inputs % KINDS[kind].elements else kind


def _kind(mix: _Mix, name: str, num_layers: int, *, tied: bool) -> BlockKind:
    if name == "head.weight" or (name == "embed.weight" and tied):
        return mix.head
    if name == "embed.weight":
        return mix.embedding or mix.base
    found = _LAYER.match(name)
    if found is not None:
        for end, kind, layers in mix.finer:
            if name.endswith(end) and layers(int(found[1]), num_layers):
                return kind
    return mix.base
