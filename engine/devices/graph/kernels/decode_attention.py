"""Attention of one token of each sequence to K and V in blocks of the cache, by Triton.

Several programs share the context of a sequence, and each gives the softmax of its own part
(https://pytorch.org/blog/flash-decoding/). What these are together is left to torch. A program computes some of the
query heads that have a KV head in common.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEWEST_HEADS = 16  # that a matrix unit takes
_WIDE = 256  # a value of more numbers takes most of a program's registers
_PROGRAMS = 512  # that keep all processors of a GPU reading
_MOST_SPLITS = 32


@triton.jit
def attend_kernel(
    q, keys, values, tables, positions, slopes, partial, sums,
    table_stride, key_stride, value_stride, value_head_stride, scale, softcap, window,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, VALUE_D: tl.constexpr, PAGE: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """`partial [S, NUM_HEADS, SPLITS, VALUE_D]` and the logarithms of the sums `[S, NUM_HEADS, SPLITS]`, float32.

    `q [S, NUM_HEADS, D]`, `keys [slots, KV_HEADS, D]`, `values [slots, KV_HEADS, VALUE_D]`. The first MAIN numbers of a
    key and the rest are multiplied apart. With VALUES_IN_KEYS a value is the first MAIN numbers. A window of 0 is none.
    The grid is (S, KV_HEADS * blocks of BLOCK_H heads, SPLITS). TILE divides PAGE.
    """
    SHARED: tl.constexpr = NUM_HEADS // KV_HEADS
    HEAD_BLOCKS: tl.constexpr = (SHARED + BLOCK_H - 1) // BLOCK_H
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    own = tl.program_id(1) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (own < SHARED)[:, None]
    heads = kv_head * SHARED + own
    rows = sequence * NUM_HEADS + heads
    position = tl.load(positions + sequence).to(tl.int32)
    first = tl.maximum(position - window + 1, 0) if window > 0 else 0
    end = position // TILE + 1
    each = tl.cdiv(end - first // TILE, SPLITS)
    begin = first // TILE + split * each
    main, rest = tl.arange(0, BLOCK_D), MAIN + tl.arange(0, BLOCK_REST)
    of_values = tl.arange(0, BLOCK_V)
    queries = tl.load(q + rows[:, None] * D + main[None, :], mask=is_head & (main < MAIN)[None, :], other=0.0)
    if MAIN < D:
        more = tl.load(q + rows[:, None] * D + rest[None, :], mask=is_head & (rest < D)[None, :], other=0.0)
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    result = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for tile in range(begin, tl.minimum(begin + each, end)):
        tokens = tile * TILE + tl.arange(0, TILE)
        # Each tile has a token that is seen, so `largest` is a number from the first one on.
        seen = (tokens <= position) & (tokens >= first)
        page = tl.load(tables + sequence * table_stride + tile * TILE // PAGE)
        slots = page.to(tl.int64) * PAGE + tokens % PAGE
        at = keys + slots[None, :] * key_stride + kv_head * D
        k = tl.load(at + main[:, None], mask=seen[None, :] & (main < MAIN)[:, None], other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee")
        if MAIN < D:
            k_rest = tl.load(at + rest[:, None], mask=seen[None, :] & (rest < D)[:, None], other=0.0)
            scores = tl.dot(more, k_rest, scores, input_precision="ieee")
        scores *= scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        if HAS_SLOPES:
            slope = tl.load(slopes + heads, mask=own < SHARED, other=0.0)
            scores -= slope[:, None] * (position - tokens)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - highest)
        weights = tl.exp(scores - highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if VALUES_IN_KEYS:
            v = tl.trans(k)
        else:
            places = slots[:, None] * value_stride + kv_head * value_head_stride + of_values[None, :]
            v = tl.load(values + places, mask=seen[:, None] & (of_values < VALUE_D)[None, :], other=0.0)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
        largest = highest
    places = rows * SPLITS + split
    is_empty = total == 0.0
    result = result / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(
        partial + places[:, None] * VALUE_D + of_values[None, :], result, mask=is_head & (of_values < VALUE_D)[None, :]
    )
    tl.store(sums + places, tl.where(is_empty, float("-inf"), largest + tl.log(total)), mask=own < SHARED)


def tile_sizes(
    num_sequences: int, num_heads: int, kv_heads: int, key_dim: int, value_dim: int, *, values_in_keys: bool
) -> dict[str, int]:
    """How the work is shared out: the tiles' and the grid's sizes, by the kernel's names for them."""
    main = value_dim if values_in_keys else key_dim
    block_v = max(triton.next_power_of_2(value_dim), 16)
    block_h = _FEWEST_HEADS if block_v > _WIDE else min(max(triton.next_power_of_2(num_heads // kv_heads), 16), 64)
    programs = num_sequences * kv_heads * triton.cdiv(num_heads // kv_heads, block_h)
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * programs <= _PROGRAMS:
        splits *= 2
    return {
        "MAIN": main,
        "BLOCK_D": max(triton.next_power_of_2(main), 16),
        "BLOCK_REST": max(triton.next_power_of_2(key_dim - main), 16),
        "BLOCK_V": block_v,
        "BLOCK_H": block_h,
        "TILE": 16 if block_v > _WIDE else 32,
        "SPLITS": splits,
    }


@torch.library.custom_op("tidewheel::decode_attention", mutates_args=())
def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    slopes: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    block_size: int,
    values_in_keys: bool,
) -> tuple[Tensor, Tensor]:
    """The result of each part of the context `[S, H, splits, V]`, and the logarithm of its sum `[S, H, splits]`.

    `q [S, H, D]` and `positions [S]`, `tables [S, W]` and the cache as in `Context`. 0 means that there is no softcap,
    or no window. Blocks have a multiple of 32 tokens.
    """
    S, H, D = q.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    sizes = tile_sizes(S, H, kv_heads, D, value_dim, values_in_keys=values_in_keys)
    partial = q.new_empty((S, H, sizes["SPLITS"], value_dim), dtype=torch.float32)
    sums = q.new_empty((S, H, sizes["SPLITS"]), dtype=torch.float32)
    grid = (S, kv_heads * triton.cdiv(H // kv_heads, sizes["BLOCK_H"]), sizes["SPLITS"])
    attend_kernel[grid](
        q.contiguous(), keys, values, tables.contiguous(), positions.contiguous(), slopes, partial, sums,
        tables.shape[1], keys.stride(0), values.stride(0), values.stride(1), scale, softcap, window,
        NUM_HEADS=H, KV_HEADS=kv_heads, D=D, VALUE_D=value_dim, PAGE=block_size,
        VALUES_IN_KEYS=values_in_keys, HAS_SOFTCAP=softcap != 0, HAS_SLOPES=slopes is not None, **sizes,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return partial, sums


@attend.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    slopes: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    block_size: int,
    values_in_keys: bool,
) -> tuple[Tensor, Tensor]:
    S, H, D = q.shape
    sizes = tile_sizes(S, H, keys.shape[1], D, values.shape[2], values_in_keys=values_in_keys)
    parts = (S, H, sizes["SPLITS"])
    return q.new_empty((*parts, values.shape[2]), dtype=torch.float32), q.new_empty(parts, dtype=torch.float32)
