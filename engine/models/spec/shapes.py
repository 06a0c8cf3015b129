"""Names and shapes of weights, and how the parts of a model combine them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def linear(out_features: int, in_features: int, bias: bool, clipped: bool = False) -> Shapes:
    """The weights of a linear layer, the matrix as `(out_features, in_features)`.

    If it is `clipped`, its bounds are the least and the greatest input, then those of outputs.
    """
    shapes: Shapes = {"weight": (out_features, in_features)}
    if bias:
        shapes["bias"] = (out_features,)
    if clipped:
        shapes["bounds"] = (4,)
    return shapes


def under(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """The same weights as a part called `prefix`."""
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}
