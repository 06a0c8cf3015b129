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


def reordered_words(words: NDArray[np.integer], bits: int, order: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Words `[K * bits / 32, N]`, each with the codes of inputs one below the other, with the inputs in that order.

    `bits` divide 32. This takes a sixth of the time that `reordered` takes for the same codes.
    """
    each = 32 // bits
    from_words, shifts = order // each, (order % each * bits).astype(np.uint32)[:, np.newaxis]
    result = np.zeros(words.shape, "<u4")
    for i in range(each):
        codes = words.view("<u4")[from_words[i::each]] >> shifts[i::each] & np.uint32((1 << bits) - 1)
        result |= codes << np.uint32(bits * i)
    return result


def reordered(codes: NDArray[np.uint8], bits: int, order: NDArray[np.integer[Any]] | None) -> NDArray[np.uint8]:
    """Packed codes `[N, bytes]` with the inputs in that order; as they are without one."""
    return codes if order is None else pack(unpack(codes, bits, len(order))[:, order], bits)
