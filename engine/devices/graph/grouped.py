"""Matrices of small numbers with scales for groups of inputs, on the device: see `grouped_weights.GroupedMatrix`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...weights.small_floats import E2M1, E4M3
from ..grouped_weights import IN_FOUR_BITS, RUN, GroupedMatrix
from .kernels.finding import kernels_of

_PIECE = 1 << 25  # weights that are dequantized at once


class Grouped:
    """A matrix `[N, K]` on the device. What is computed with it has the type `dtype`, in which weights are rounded.

    On GPUs a kernel of Triton multiplies with it. Elsewhere some rows at a time are dequantized.
    """

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.shape = dtype, matrix.shape
        self.values, self.group_size, self.middle = matrix.values, matrix.group_size, matrix.middle
        self.factor_run = matrix.factor_run
        arrays = {name: _on_device(array, device) for name, array in matrix.arrays.items()}
        self.codes, self.scales = arrays["codes"], arrays["scales"]
        self.factors, self.zeros = arrays.get("factors"), arrays.get("zeros")
        self.minima, self.minimum_factors = arrays.get("minima"), arrays.get("minimum_factors")
        numbers = {"e4m3": E4M3, "e2m1": E2M1}.get(matrix.values, matrix.table)
        self.table = None if numbers is None else torch.from_numpy(numbers.copy()).to(device)
        order = matrix.input_order
        self._order = None if order is None else torch.from_numpy(order.copy()).to(device)
        self._kernels = kernels_of("grouped_matmul", device)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        tensors = (self.codes, self.scales, self.factors, self.zeros, self.minima, self.minimum_factors, self._order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def multiply(self, x: Tensor) -> Tensor:
        """`x W^T` of `x [..., K]`, which has the type `dtype`."""
        if self._order is not None:
            x = x.index_select(-1, self._order)
        if self._kernels is not None:
            return self._by_kernel(x.reshape(1, -1, x.shape[-1])).view(*x.shape[:-1], -1)
        rows, inputs = self.shape
        step = max(_PIECE // inputs, 1)
        starts = range(0, rows, step)
        return torch.cat([functional.linear(x, self._dequantized(slice(at, at + step))) for at in starts], -1)

    @staticmethod
    def stacked(parts: Sequence[Grouped]) -> Grouped:
        """Matrices of one format, one below the other: see `multiply_blocks`."""
        stack = copy(parts[0])
        stack.shape = sum(part.shape[0] for part in parts), stack.shape[1]
        for name in ("codes", "scales", "factors", "zeros", "minima", "minimum_factors"):
            if getattr(stack, name) is not None:
                setattr(stack, name, torch.cat([getattr(part, name) for part in parts]))
        return stack

    def multiply_blocks(self, x: Tensor, chosen: Tensor, used: Tensor, num_matrices: int) -> Tensor:
        """Products of blocks `x [blocks, size, K]` with the `chosen [blocks]` ones of the matrices in this stack.

        What blocks from `used [1]` on give may be left out.
        """
        if self._order is not None:
            x = x.index_select(-1, self._order)
        if self._kernels is not None:
            return self._by_kernel(x, num_matrices, chosen, used)
        rows = self.shape[0] // num_matrices
        own = torch.arange(rows, device=x.device)
        step = max(_PIECE // (rows * self.shape[1]), 1)
        products = []
        for start in range(0, len(x), step):
            some, of = x[start : start + step], chosen[start : start + step].long()
            weights = self._dequantized((of[:, None] * rows + own).flatten()).view(len(some), rows, -1)
            products.append(torch.bmm(some, weights.mT))
        return torch.cat(products)

    def _by_kernel(
        self, x: Tensor, num_matrices: int = 1, chosen: Tensor | None = None, used: Tensor | None = None
    ) -> Tensor:
        assert self._kernels is not None
        product: Tensor = self._kernels.multiply(
            x, self.codes, self.scales, self.factors, self.zeros, self.minima, self.minimum_factors,
            self.table if self.values == "table4" else None, chosen, used, self.shape[0] // num_matrices,
            self.values, self.middle, self.group_size, self.factor_run,
        )  # fmt: skip
        return product

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
        if self.values in IN_FOUR_BITS:
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
