"""Products with matrices of small numbers, which are dequantized tile by tile: see `grouped_weights.GroupedMatrix`.

Weights are the first operand of the products and tokens the second, so that few tokens fill a tensor core's tile. With
few tokens several programs share the inputs of a row, and their sums are added behind them, always in one order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256  # that keep all processors of a GPU reading
_FEWEST_STEPS = 4  # of a program
HALF_RUN = tl.constexpr(32)  # half of grouped_weights.RUN


@triton.jit
def _numbers(codes, VALUES: tl.constexpr, MIDDLE: tl.constexpr, table):
    """What codes mean, in float32."""
    if VALUES == "e4m3":
        # The bits of a float16 with an exponent that is 8 too small. Float16 also has the numbers below 2^-6.
        bits = codes.to(tl.int16)
        half = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True)
        numbers = half.to(tl.float32) * 256.0
    elif VALUES == "e2m1":
        bits = codes.to(tl.int16)  # the same, with an exponent that is 14 too small
        half = ((bits & 8) << 12 | (bits & 7) << 9).to(tl.float16, bitcast=True)
        numbers = half.to(tl.float32) * 16384.0
    elif VALUES == "table4":
        numbers = tl.load(table + codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float32) - MIDDLE
    return numbers


@triton.jit
def _of_groups(array, factors, rows, groups, real, stride, factor_stride, RUN: tl.constexpr):
    """The numbers of groups `[N, G]` with their factors, in float32."""
    numbers = tl.load(array + rows * stride + groups, mask=real, other=0).to(tl.float32)
    if factors is not None:
        numbers *= tl.load(factors + rows * factor_stride + groups // RUN, mask=real, other=0).to(tl.float32)
    return numbers


@triton.jit
def grouped_matmul(
    x, codes, scales, factors, zeros, minima, minimum_factors, table, experts, used, y,
    size, outputs, inputs, code_stride, scale_stride, factor_stride,
    VALUES: tl.constexpr, MIDDLE: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """`y [SPLITS, blocks, size, outputs]` of blocks of tokens `x [blocks, size, inputs]`.

    Block i is multiplied with the matrix `experts[i]` of those that lie one below the other, and blocks from `used[0]`
    on with none, so that they are 0. Without `experts` there is one matrix.

    The grid is (outputs / BLOCK_N, blocks * tiles of BLOCK_T tokens, SPLITS). BLOCK_B is in bytes of codes.
    """
    IN_FOUR: tl.constexpr = (VALUES != "int8") & (VALUES != "e4m3")
    tiles = tl.cdiv(size, BLOCK_T)
    block = tl.program_id(1) // tiles
    own_tokens = tl.program_id(1) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = (block * size + own_tokens).to(tl.int64)[None, :]
    real_tokens = (own_tokens < size)[None, :]
    own_rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_rows = (own_rows < outputs)[:, None]
    rows = own_rows.to(tl.int64)[:, None]
    if experts is not None:
        rows += tl.load(experts + block).to(tl.int64) * outputs
    # As many neighbouring codes have a group in common.
    SHARED: tl.constexpr = min(GROUP, 32) if IN_FOUR else min(GROUP, BLOCK_B)
    CHUNKS: tl.constexpr = BLOCK_B // SHARED
    HALVES: tl.constexpr = 2 if IN_FOUR else 1
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    steps = tl.cdiv(code_stride, BLOCK_B)
    each = tl.cdiv(steps, SPLITS)
    first_step = tl.program_id(2) * each
    if used is not None:
        steps = tl.where(block < tl.load(used), steps, 0)
    for step in range(first_step, tl.minimum(first_step + each, steps)):
        at = step * BLOCK_B + tl.arange(0, BLOCK_B)
        starts = step * BLOCK_B + tl.arange(0, CHUNKS) * SHARED
        packed = tl.load(
            codes + rows * code_stride + at[None, :], mask=real_rows & (at < code_stride)[None, :], other=0
        )
        for half in tl.static_range(HALVES):
            if IN_FOUR:
                columns = at // HALF_RUN * (2 * HALF_RUN) + at % HALF_RUN + half * HALF_RUN
                groups = (starts // HALF_RUN * (2 * HALF_RUN) + starts % HALF_RUN + half * HALF_RUN) // GROUP
                own = packed >> 4 if half else packed & 15
            else:
                columns = at
                groups = starts // GROUP
                own = packed
            real = real_rows & (groups < scale_stride)[None, :]
            groups = groups[None, :]
            weights = tl.reshape(_numbers(own, VALUES, MIDDLE, table), (BLOCK_N, CHUNKS, SHARED))
            if zeros is not None:
                points = tl.load(zeros + rows * scale_stride + groups, mask=real, other=0).to(tl.float32)
                weights -= points[:, :, None]
            weights *= _of_groups(scales, factors, rows, groups, real, scale_stride, factor_stride, RUN)[:, :, None]
            if minima is not None:
                least = _of_groups(minima, minimum_factors, rows, groups, real, scale_stride, factor_stride, RUN)
                weights -= least[:, :, None]
            of_tokens = tl.load(
                x + tokens * inputs + columns[:, None], mask=real_tokens & (columns < inputs)[:, None], other=0.0
            )
            rounded = tl.reshape(weights, (BLOCK_N, BLOCK_B)).to(of_tokens.dtype)
            total = tl.dot(rounded, of_tokens, total, input_precision="ieee")
    places = (tl.program_id(2) * (tl.num_programs(1) // tiles) * size + tokens) * outputs + own_rows[:, None]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=real_rows & real_tokens)


def tile_sizes(size: int, outputs: int, code_bytes: int, num_blocks: int, *, in_four: bool) -> dict[str, int]:
    """How a product is shared out: the grid's and the tiles' sizes, by the kernel's names for them."""
    block_t = min(max(triton.next_power_of_2(size), 16), 128)
    block_n = 64 if block_t <= 64 else 128
    block_b = 64 if in_four else 128
    programs = -(-outputs // block_n) * num_blocks * -(-size // block_t)
    steps = -(-code_bytes // block_b)
    splits = 1
    while block_t <= 64 and 2 * splits * programs <= _PROGRAMS and 2 * splits * _FEWEST_STEPS <= steps:
        splits *= 2
    return {"BLOCK_N": block_n, "BLOCK_T": block_t, "BLOCK_B": block_b, "SPLITS": splits}


def num_stages() -> int:
    """How many tiles are loaded ahead. AMD's GPUs have 64 KiB of shared memory, and Triton's default for them is 2."""
    return 2 if torch.version.hip else 3


@torch.library.custom_op("tidewheel::grouped_matmul", mutates_args=())
def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    factors: Tensor | None,
    zeros: Tensor | None,
    minima: Tensor | None,
    minimum_factors: Tensor | None,
    table: Tensor | None,
    experts: Tensor | None,
    used: Tensor | None,
    outputs: int,
    values: str,
    middle: int,
    group_size: int,
    factor_run: int,
) -> Tensor:
    """`x [blocks, size, inputs]` times the matrices of `experts [blocks]`, or the only one, in the same type."""
    num_blocks, size, inputs = x.shape
    in_four = values not in ("int8", "e4m3")
    sizes = tile_sizes(size, outputs, codes.shape[1], num_blocks, in_four=in_four)
    splits = sizes["SPLITS"]
    y = x.new_empty((splits, num_blocks, size, outputs), dtype=torch.float32 if splits > 1 else x.dtype)
    grid = (
        triton.cdiv(outputs, sizes["BLOCK_N"]),
        num_blocks * triton.cdiv(size, sizes["BLOCK_T"]),
        splits,
    )
    grouped_matmul[grid](
        x.contiguous(), codes, scales, factors, zeros, minima, minimum_factors, table, experts, used, y,
        size, outputs, inputs, codes.shape[1], scales.shape[1], 0 if factors is None else factors.shape[1],
        VALUES=values, MIDDLE=middle, GROUP=triton.next_power_of_2(group_size), RUN=factor_run, **sizes,
        num_warps=4 if sizes["BLOCK_T"] <= 64 else 8, num_stages=1 if values == "table4" else num_stages(),
    )  # fmt: skip
    return y.sum(0).to(x.dtype) if splits > 1 else y.squeeze(0)


@multiply.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    factors: Tensor | None,
    zeros: Tensor | None,
    minima: Tensor | None,
    minimum_factors: Tensor | None,
    table: Tensor | None,
    experts: Tensor | None,
    used: Tensor | None,
    outputs: int,
    values: str,
    middle: int,
    group_size: int,
    factor_run: int,
) -> Tensor:
    return x.new_empty((*x.shape[:2], outputs))
