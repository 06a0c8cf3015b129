"""Matrices of small numbers with scales for groups of inputs, on the device: see `grouped_weights.GroupedMatrix`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...weights.small_floats import E4M3
from ..grouped_weights import RUN, GroupedMatrix

_PIECE = 1 << 25  # weights that are dequantized at once


class Grouped:
    """A matrix `[N, K]` on the device. What is computed with it has the type `dtype`, in which weights are rounded.

    To multiply with it, some rows at a time are dequantized.
    """

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.shape = dtype, matrix.shape
        self.values, self.group_size, self.middle = matrix.values, matrix.group_size, matrix.middle
        self.factor_run = matrix.factor_run
        arrays = {name: _on_device(array, device) for name, array in matrix.arrays.items()}
        self.codes, self.scales = arrays["codes"], arrays["scales"]
        self.factors, self.zeros = arrays.get("factors"), arrays.get("zeros")
        self.minima, self.minimum_factors = arrays.get("minima"), arrays.get("minimum_factors")
        numbers = E4M3 if matrix.values == "e4m3" else matrix.table
        self.table = None if numbers is None else torch.from_numpy(numbers.copy()).to(device)
        order = matrix.input_order
        self._order = None if order is None else torch.from_numpy(order.copy()).to(device)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        tensors = (self.codes, self.scales, self.factors, self.zeros, self.minima, self.minimum_factors, self._order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def multiply(self, x: Tensor) -> Tensor:
        """`x W^T` of `x [..., K]`, which has the type `dtype`."""
        if self._order is not None:
            x = x.index_select(-1, self._order)
        rows, inputs = self.shape
        step = max(_PIECE // inputs, 1)
        starts = range(0, rows, step)
        return torch.cat([functional.linear(x, self._dequantized(slice(at, at + step))) for at in starts], -1)

    def rows(self, index: Tensor) -> Tensor:
        """Rows `index [...]` of the matrix, `[..., K]`."""
        return self._ordered(self._dequantized(index.flatten())).view(*index.shape, -1)

    def dense(self) -> Tensor:
        """All weights, `[N, K]`, inputs in the model's order."""
        return self._ordered(self._dequantized(slice(None)))

    def _ordered(self, weights: Tensor) -> Tensor:
        return weights if self._order is None else weights.index_select(-1, self._order.argsort())

    def _dequantized(self, index: slice | Tensor) -> Tensor:
        """Some rows, `[R, K]`, inputs in the stored order."""
        values = self._numbers(self.codes[index])
        groups = self.scales.shape[1]
        padding = groups * self.group_size - self.shape[1]
        values = functional.pad(values, (0, padding)).view(-1, groups, self.group_size)
        if self.zeros is not None:
            values = values - self.zeros[index].float()[..., None]
        values = values * self._product(self.scales, self.factors, index)
        if self.minima is not None:
            values = values - self._product(self.minima, self.minimum_factors, index)
        return values.flatten(-2)[..., : self.shape[1]].to(self.dtype)

    def _numbers(self, codes: Tensor) -> Tensor:
        if self.values == "int8":
            return codes.float()
        if self.values in ("int4", "table4"):
            runs = codes.view(len(codes), -1, RUN // 2)
            codes = torch.cat([runs & 15, runs >> 4], -1).flatten(-2)[..., : self.shape[1]]
        return codes.float() - self.middle if self.table is None else self.table[codes.long()]

    def _product(self, numbers: Tensor, factors: Tensor | None, index: slice | Tensor) -> Tensor:
        """For each group, `[R, G, 1]`."""
        chosen = numbers[index].float()
        if factors is not None:
            run = min(self.factor_run, chosen.shape[-1])
            spread = factors[index].float().repeat_interleave(run, -1)[..., : chosen.shape[-1]]
            chosen = spread * chosen
        return chosen[..., None]


def _on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    host = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
    return (host.view(torch.bfloat16) if array.dtype == np.uint16 else host).to(device)
