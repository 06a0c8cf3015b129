"""A captured graph: the operations, and the memory that they read and write."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from engine.devices.fakes.accelerator import Accelerator, Allocation, DeviceTensor, FakeDeviceError, is_view
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only


@dataclass
class _Operation:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Tensor]  # memory of the graph that the operation fills; empty if it writes to its operands


class Recording:
    """What was asked of a device during a capture.

    Replaying runs the same operations on the same memory. What Python does around them does not happen again. Nothing
    is computed before the replay.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._operations: list[_Operation] = []
        self._outside: dict[int, weakref.ref[Allocation]] = {}
        self.replays = 0

    def record(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        operands: Sequence[DeviceTensor],
        written: Sequence[DeviceTensor],
    ) -> Any:
        """Take an operation on inner tensors. Returns its result."""
        for operand in operands:
            if operand.allocation.recording is not self:
                self._outside[id(operand.allocation)] = weakref.ref(operand.allocation)
        if written:
            self._operations.append(_Operation(function, args, kwargs, []))
            targets = [target.inner for target in written]
            return targets[0] if len(targets) == 1 else tuple(targets)
        result = function(*args, **kwargs) if is_view(function) else _like(function, args, kwargs)
        read = {operand.inner.untyped_storage()._cdata for operand in operands}
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        if any(tensor.untyped_storage()._cdata not in read for tensor in made):
            self._operations.append(_Operation(function, args, kwargs, made))
        return result

    def replay(self) -> None:
        """Run it again. Raises FakeDeviceError if memory that it uses has been freed."""
        if any(allocation() is None for allocation in self._outside.values()):
            raise FakeDeviceError("the graph uses memory that has been freed since it was captured")
        self.replays += 1
        with torch.inference_mode():
            for operation in self._operations:
                result = operation.function(*operation.args, **operation.kwargs)
                made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
                for own, value in zip(operation.results, made, strict=False):
                    own.copy_(value)


def _like(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Memory for what an operation gives, which holds anything: nothing is computed during a capture."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    shapes = function(*args, **kwargs)
    return tree_map_only(
        Tensor, lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), shapes
    )
