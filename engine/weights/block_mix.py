"""Which of GGUF's types each matrix has with a --quantization that mixes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .block_types import BLOCK_TYPES, BlockKind

BlockMethod = Literal["int4", "q4_k_m", "q5_k_m", "q6_k", "q8_0"]

_ELEMENTS = {kind.name.lower(): kind.elements for kind in BLOCK_TYPES.values()}
_SMALLER: dict[BlockKind, BlockKind] = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # the same as llama.cpp's
_LAYER = re.compile(r"layers\.(\d+)\.")
_VALUES, _DOWN = ".v.weight", ".down.weight"
_HEADS = ("embed.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class _Mix:
    """`base` is the type of most matrices, and `heads` that of embedding and head.

    `finer` is for the values and for the last matrix of the MLP in the layers that `_has_more_bits` chooses; with
    `all_values`, for the values of all layers. `smaller` has the replacement of each type with super-blocks where the
    inputs do not fill them.
    """

    base: BlockKind
    finer: BlockKind
    heads: BlockKind
    all_values: bool = False
    smaller: Mapping[BlockKind, BlockKind] = field(default_factory=_SMALLER.copy)


# Names that llama.cpp also has mean the same types as there. int4 is the mix with the least error that was found for no
# more bits than q4_k_m: values are few and matter most, and an embedding loses little with 5 bits.
_MIXES: dict[BlockMethod, _Mix] = {
    "int4": _Mix("q4_k", "q6_k", "q5_k", all_values=True, smaller={**_SMALLER, "q4_k": "q5_1"}),
    "q4_k_m": _Mix("q4_k", "q6_k", "q6_k"),
    "q5_k_m": _Mix("q5_k", "q6_k", "q6_k"),
    "q6_k": _Mix("q6_k", "q6_k", "q6_k"),
    "q8_0": _Mix("q8_0", "q8_0", "q8_0"),
}


def block_kind(method: BlockMethod, name: str, inputs: int, num_layers: int) -> BlockKind | None:
    """The type of a matrix of that name with `inputs` columns, in a model of `num_layers`; None: it stays in floats.

    Where inputs are no multiple of 256, a type with blocks of 32 takes the place of one with super-blocks. A matrix
    whose inputs are no multiple of 32 stays in floats.
    """
    mix = _MIXES[method]
    kind = mix.heads if name in _HEADS else mix.base
    values = name.endswith(_VALUES)
    if (values and mix.all_values) or ((values or name.endswith(_DOWN)) and _has_more_bits(name, num_layers)):
        kind = mix.finer
    if inputs % _ELEMENTS[kind]:
        kind = mix.smaller.get(kind, kind)
    return None if inputs % _ELEMENTS[kind] else kind


def _has_more_bits(name: str, num_layers: int) -> bool:
    """Whether it is in the first or last eighth of the layers, or in every third of the others."""
    found = _LAYER.match(name)
    if found is None:
        return False
    layer, eighth = int(found[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
