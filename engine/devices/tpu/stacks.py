"""Which arrays the chips have of a model's weights: the matrices of a layer's experts are stacks."""

from __future__ import annotations

import re

from ...models.spec.shapes import Shapes

_OF_EXPERT = re.compile(r"(layers\.\d+\.experts)\.\d+\.(.+)")


def stacked(shapes: Shapes) -> dict[str, list[str]]:
    """The names of the arrays, each with the weights that it is made of: one, or those of all experts in order.

    The matrices `layers.0.experts.7.up.weight [outputs, inputs]` are `layers.0.experts.up.weight [experts, inputs,
    outputs]`: the other way round, as a TPU multiplies a stack without copying it. Their biases are `[experts,
    outputs]`.
    """
    arrays: dict[str, list[str]] = {}
    for name in shapes:
        expert = _OF_EXPERT.fullmatch(name)
        arrays.setdefault(name if expert is None else f"{expert[1]}.{expert[2]}", []).append(name)
    return arrays


def array_shapes(shapes: Shapes) -> Shapes:
    """The shapes of the arrays by their names."""
    return {
        array: shapes[names[0]] if names == [array] else (len(names), *reversed(shapes[names[0]]))
        for array, names in stacked(shapes).items()
    }


def expert_shapes(shapes: Shapes) -> dict[str, tuple[int, int, int]]:
    """The experts, inputs and outputs of each stack of matrices, by its name."""
    found = {}
    for array, names in stacked(shapes).items():
        if names != [array] and array.endswith(".weight"):
            outputs, inputs = shapes[names[0]]
            found[array] = len(names), inputs, outputs
    return found
