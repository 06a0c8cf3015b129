"""Attention over pages of K and V, and writing to them.

A page array is `[pages, page_size, 2 * G, D]` with K of KV head g at 2g and its V at 2g + 1. Where the kernel computes
head by head it is `[pages, G, page_size, 2, D]`. A page array of latents is `[pages, page_size, D]`: one key for all
heads, of which the first numbers are also its value. Dimensions: T tokens, S sequences, W pages of a block table, H
query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_CHUNK = 16  # tokens that read the cache together; every size of step is a multiple of it
_TILE = 128  # cached tokens that they read at a time, from fixed positions
# A core's default share of vector memory is 16 MiB. The kernel holds two blocks of pages there, a block of queries with
# what becomes of them, and the scores of one KV head, several times.
_KERNEL_PAGES_BYTES = 4 << 20
_KERNEL_SCORES_BYTES = 1 << 20
_KERNEL_TOKENS = 32
_KERNEL_QUERIES = 2048  # of all heads
_KERNEL_QUERIES_OF_A_HEAD = 512  # that share a KV head


class Sequences(NamedTuple):
    """Where tokens and their contexts lie: see `StepInputs`. All of one cache group."""

    positions: jax.Array  # [T]
    sequence: jax.Array  # [T]
    tables: jax.Array  # [S, W]
    query_start: jax.Array  # [S + 1]
    context_len: jax.Array  # [S]
    num_seqs: jax.Array  # [1]


@dataclass(frozen=True, slots=True)
class Scores:
    """How queries and keys make scores: as in AttentionSpec."""

    scale: float
    window: int | None
    softcap: float | None


def write(pages: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The pages with `k` and `v`, `[T, G, D]`, written to `slots [T]`; slots behind the last page are left out.

    A page's heads may be wider: the rest is zeros.
    """
    dim = pages.shape[-1]
    both = _widened(jnp.stack((k, v), axis=2), dim).astype(pages.dtype)
    if pages.ndim == 5:
        heads, size = pages.shape[1:3]
        rows = (slots[:, None] // size * heads + jnp.arange(heads)) * size + slots[:, None] % size
        return pages.reshape(-1, 2, dim).at[rows].set(both, mode="drop").reshape(pages.shape)
    page, size, heads, _ = pages.shape
    rows = both.reshape(-1, heads, dim)
    return pages.reshape(page * size, heads, dim).at[slots].set(rows, mode="drop").reshape(pages.shape)


def write_latents(pages: jax.Array, slots: jax.Array, latents: jax.Array) -> jax.Array:
    """The pages with `latents [T, D]` written to `slots [T]`; slots behind the last page are left out."""
    flat = pages.reshape(-1, pages.shape[-1])
    return flat.at[slots].set(latents.astype(pages.dtype), mode="drop").reshape(pages.shape)


def attend(
    q: jax.Array,
    pages: jax.Array,
    sequences: Sequences,
    scores: Scores,
    slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention in float32, `q [T, H, D]`, of the same shape. `slopes [H]` are ALiBi's, `sinks [H]` as well."""
    size, heads = pages.shape[1:3]

    def split(cached: jax.Array) -> tuple[jax.Array, jax.Array]:
        kv = cached.reshape(-1, cached.shape[1] * size, heads // 2, 2, q.shape[-1])
        return kv[..., 0, :], kv[..., 1, :]

    return _attend(q, pages, sequences, scores, split, slopes, sinks)


def attend_latents(q: jax.Array, pages: jax.Array, sequences: Sequences, scores: Scores, value_dim: int) -> jax.Array:
    """The same for pages of latents: `[T, H, value_dim]`, sums of the first numbers of the keys."""

    def split(cached: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = cached.reshape(len(cached), -1, 1, q.shape[-1])
        return k, k[..., :value_dim]

    return _attend(q, pages, sequences, scores, split, None, None)


def _attend(
    q: jax.Array,
    pages: jax.Array,
    sequences: Sequences,
    scores: Scores,
    split: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    slopes: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """A few tokens at a time read a tile of the cache at a time, with a running maximum and sum
    (https://arxiv.org/abs/1805.02867). Memory does not grow with the context, and tiles behind it take no time.

    `split` makes K and V, both `[tokens, tile, G, numbers]`, of the tokens' pages `[tokens, columns, *page] float32`.
    """
    T, H, D = q.shape
    size = pages.shape[1]
    columns = max(1, _TILE // size)
    tile = columns * size
    width = sequences.tables.shape[1]
    k, v = jax.eval_shape(split, jax.ShapeDtypeStruct((_CHUNK, columns, *pages.shape[1:]), jnp.float32))
    G, value_dim = k.shape[2], v.shape[3]

    def read(tables: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Positions behind the table's end are invisible; any page can stand in for theirs.
        places = jnp.minimum(index * columns + jnp.arange(columns), width - 1)
        return split(pages[tables[:, places]].astype(jnp.float32))

    def chunk(arguments: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, positions, sequence = arguments  # [C, G, H / G, D], [C], [C]
        tables = sequences.tables[sequence]

        def add_tile(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, result = carry
            k, v = read(tables, index)
            cached = index * tile + jnp.arange(tile)
            visible = cached <= positions[:, None]
            if scores.window is not None:
                visible &= cached > positions[:, None] - scores.window
            score = jnp.einsum("tghd,tcgd->tghc", q, k, precision=lax.Precision.HIGHEST) * scores.scale
            if scores.softcap is not None:
                score = scores.softcap * jnp.tanh(score / scores.softcap)
            if slopes is not None:
                distance = (cached - positions[:, None]).astype(jnp.float32)
                score += slopes.reshape(G, -1, 1) * distance[:, None, None, :]
            score = jnp.where(visible[:, None, None, :], score, -jnp.inf)
            # Finite also where a token sees nothing of this tile, so that no difference of infinities arises.
            new_largest = jnp.maximum(jnp.maximum(largest, score.max(-1)), jnp.finfo(jnp.float32).min)
            shrink = jnp.exp(largest - new_largest)
            weights = jnp.exp(score - new_largest[..., None])
            # An unused slot may hold anything, and zero times infinity is not zero.
            v = jnp.where(visible[:, :, None, None], v, 0.0)
            values = jnp.einsum("tghc,tcgd->tghd", weights, v, precision=lax.Precision.HIGHEST)
            return new_largest, total * shrink + weights.sum(-1), result * shrink[..., None] + values

        first = 0 if scores.window is None else jnp.maximum(positions.min() - scores.window + 1, 0) // tile
        start = jnp.full(q.shape[:-1], -jnp.inf), jnp.zeros(q.shape[:-1]), jnp.zeros((*q.shape[:-1], value_dim))
        largest, total, result = lax.fori_loop(first, positions.max() // tile + 1, add_tile, start)
        if sinks is not None:
            total += jnp.exp(sinks.reshape(G, -1) - largest)
        return result / total[..., None]

    # K was rounded to the type of the cache, so q is rounded too.
    q = q.astype(pages.dtype).astype(jnp.float32).reshape(T // _CHUNK, _CHUNK, G, H // G, D)
    by_chunk = sequences.positions.reshape(-1, _CHUNK), sequences.sequence.reshape(-1, _CHUNK)
    return lax.map(chunk, (q, *by_chunk)).reshape(T, H, value_dim)


def kernel_attend(q: jax.Array, pages: jax.Array, sequences: Sequences, scores: Scores) -> jax.Array:
    """The same by the Pallas kernel for TPUs, without slopes and sinks. Zeros for tokens of padding.

    D is the pages', a multiple of 128; `q` may have less.
    """
    T, H, D = q.shape
    dim = pages.shape[-1]
    wide = _widened(q, dim).astype(pages.dtype)
    if scores.window is not None:
        sequences = _without_unseen(sequences, scores.window, pages.shape[-3], T)
    if pages.ndim == 4:
        result = _run_kernel(wide, pages, sequences, scores)
    else:
        heads = pages.shape[1]
        own_pages = pages.reshape(-1, *pages.shape[2:])  # a page of each head behind the other

        def attend_by(head: tuple[jax.Array, jax.Array]) -> jax.Array:
            queries, index = head
            tables = sequences.tables * heads + index
            return _run_kernel(queries, own_pages, sequences._replace(tables=tables), scores)

        by_head = wide.reshape(T, heads, H // heads, dim).swapaxes(0, 1)
        result = lax.map(attend_by, (by_head, jnp.arange(heads))).swapaxes(0, 1).reshape(wide.shape)
    # What the kernel leaves in rows of padding may be no number, and would spoil the pages that it reads and masks.
    real = jnp.arange(T) < sequences.query_start[-1]
    return jnp.where(real[:, None, None], result[:, :, :D].astype(jnp.float32), 0.0)


def _without_unseen(sequences: Sequences, window: int, page_size: int, num_tokens: int) -> Sequences:
    """The same contexts from the first page on that is in the window of one of a step's tokens.

    The kernel would read the pages before it, too. Where tokens lie follows from the ends of their contexts.
    """
    tables, context_len = sequences.tables, sequences.context_len
    begin = context_len - jnp.diff(sequences.query_start)  # the first token of the step
    unseen = jnp.maximum(begin - window + 1, 0) // page_size
    width = min(tables.shape[1], -(-(window - 1 + num_tokens) // page_size) + 1)
    columns = jnp.minimum(unseen[:, None] + jnp.arange(width), tables.shape[1] - 1)
    return sequences._replace(
        tables=jnp.take_along_axis(tables, columns, axis=1), context_len=context_len - unseen * page_size
    )


def _run_kernel(q: jax.Array, pages: jax.Array, sequences: Sequences, scores: Scores) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    T, H, _ = q.shape
    size, heads = pages.shape[1:3]
    share = H // (heads // 2)  # query heads of a KV head
    tokens = _power_of_two(min(T, _KERNEL_TOKENS, _KERNEL_QUERIES // H, _KERNEL_QUERIES_OF_A_HEAD // share))
    page_bytes = 2 * size * heads * pages.shape[3] * pages.dtype.itemsize  # in both blocks
    columns = min(_KERNEL_PAGES_BYTES // page_bytes, _KERNEL_SCORES_BYTES // (4 * tokens * share * size))
    return ragged_paged_attention(
        q,
        pages,
        sequences.context_len,
        sequences.tables,
        sequences.query_start,
        sequences.num_seqs,
        sm_scale=scores.scale,
        sliding_window=scores.window,
        soft_cap=scores.softcap,
        num_kv_pages_per_block=max(1, min(sequences.tables.shape[1], columns)),
        num_queries_per_block=tokens,
    )


def _power_of_two(largest: int) -> int:
    """The largest that is not above a number, and 1 for all numbers below 2."""
    return 1 << max(0, largest.bit_length() - 1)


def _widened(heads: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, dim - heads.shape[-1])])
