"""Groups of inputs that share a scale, in the checkpoint's order or in one of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.config import ConfigReader
from ..bits import pack, unpack
from .layer import LayerTensors


def read_group_size(config: ConfigReader, name: str = "group_size") -> int | None:
    """The inputs of a group; None is all of them, which files write as -1. Raises ModelError."""
    return None if config.raw(name) in (-1, None) else config.integer(name)


def input_order(layer: LayerTensors, part: str, inputs: int, group_size: int) -> NDArray[np.int64] | None:
    """The order that brings inputs of a group together, where tensor `part` `[K]` gives each input's group.

    None if they are together as they are. Raises ModelError if the groups are not full.
    """
    groups = layer.array(part)
    if np.array_equal(groups, np.arange(inputs) // group_size):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(inputs) // group_size):
        raise layer.error(part, f"must give each of {-(-inputs // group_size)} groups {group_size} of {inputs} inputs")
    return order


def no_codes(shape: tuple[int, int], bits: int) -> NDArray[np.uint8]:
    """Packed codes of that shape that take no memory and mean nothing."""
    return np.broadcast_to(np.uint8(0), (shape[0], -(-shape[1] * bits // 8)))


def reordered(codes: NDArray[np.uint8], bits: int, order: NDArray[np.integer[Any]] | None) -> NDArray[np.uint8]:
    """Packed codes `[N, bytes]` with the inputs in that order; as they are without one."""
    return codes if order is None else pack(unpack(codes, bits, len(order))[:, order], bits)
