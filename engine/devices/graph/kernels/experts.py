"""Products of blocks of rows with matrices of their experts, by Triton: no matrix is copied.

https://triton-lang.org. Importing this needs triton, which torch's wheels for GPUs bring.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEWEST_ROWS = 16  # that a matrix unit takes


@triton.jit
def multiply_kernel(
    x, matrices, experts, used, out, N, K, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """`out[block] = x[block] @ matrices[experts[block]].T`, `ROWS` of a block's `SIZE` rows and `COLUMNS` at a time.

    `x [blocks, SIZE, K]`, `matrices [experts, N, K]`, `out [blocks, SIZE, N]`. Blocks from `used[0]` on are left out.
    """
    tiles: tl.constexpr = (SIZE + ROWS - 1) // ROWS
    block = tl.program_id(1) // tiles
    if block < tl.load(used):
        expert = tl.load(experts + block).to(tl.int64)
        rows = tl.program_id(1) % tiles * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = rows[:, None] < SIZE, columns[None, :] < N
        first = block.to(tl.int64) * SIZE + rows[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            left = tl.load(x + first * K + depth[None, :], mask=is_row & (depth[None, :] < K), other=0.0)
            right = tl.load(
                matrices + (expert * N + columns[None, :]) * K + depth[:, None],
                mask=is_column & (depth[:, None] < K),
                other=0.0,
            )
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(out + first * N + columns[None, :], total.to(out.dtype.element_ty), mask=is_row & is_column)


def tiles_of(size: int) -> dict[str, int]:
    """The tiles for blocks of `size` rows: few rows are bound by reading matrices, many by products."""
    rows = min(max(size, _FEWEST_ROWS), 128)
    if rows <= _FEWEST_ROWS:
        return {"ROWS": rows, "COLUMNS": 32, "DEPTH": 128, "num_warps": 4, "num_stages": 4}
    return {"ROWS": rows, "COLUMNS": 128, "DEPTH": 32, "num_warps": 8 if rows == 128 else 4, "num_stages": 3}


@torch.library.custom_op("tidewheel::multiply_experts", mutates_args=())
def multiply_experts(x: Tensor, matrices: Tensor, experts: Tensor, used: Tensor) -> Tensor:
    """`[blocks, size, N]`, of `x [blocks, size, K]` and `matrices [E, N, K]` of one type. All are contiguous.

    `experts [blocks]` and `used [1]`, the number of blocks that count, are int64. Other blocks hold anything.
    """
    blocks, size, depth = x.shape
    columns = matrices.shape[1]
    out = x.new_empty((blocks, size, columns))
    tiles = tiles_of(size)
    grid = (triton.cdiv(columns, tiles["COLUMNS"]), blocks * triton.cdiv(size, tiles["ROWS"]))
    multiply_kernel[grid](x, matrices, experts, used, out, columns, depth, SIZE=size, **tiles)
    return out


@multiply_experts.register_fake
def _(x: Tensor, matrices: Tensor, experts: Tensor, used: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], matrices.shape[1]))
