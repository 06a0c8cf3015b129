"""The sizes that steps are padded to, and the size of a KV page. No JAX here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FEWEST_TOKENS = 16
_FEWEST_ROWS = 8
_PAGE_SIZES = (16, 32, 64, 128, 256)
_LONG_CONTEXT = 8192  # above it the attention kernel does best with the smallest pages
_PAGES_PER_SEQUENCE = 16  # of shorter contexts
# The attention kernel keeps the block tables in scalar memory. A core has 1 MiB of it.
_TABLE_BYTES = 1 << 19
_INDEX_BYTES = 4


def token_buckets(max_num_batched_tokens: int, padding_gap: int = 0) -> tuple[int, ...]:
    """How many tokens steps are padded to: powers of two from 16 up to the first that holds the largest step.

    With a `padding_gap` the powers end at it, and multiples of it follow.
    """
    buckets = [_FEWEST_TOKENS]
    while buckets[-1] < max_num_batched_tokens:
        last = buckets[-1]
        doubles = not padding_gap or 2 * last <= padding_gap
        buckets.append(2 * last if doubles else (last // padding_gap + 1) * padding_gap)
    return tuple(buckets)


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """How many rows the head is padded to: powers of two from 8, and the most that a step may have."""
    most = max(max_num_seqs, _FEWEST_ROWS)
    powers = (_FEWEST_ROWS << shift for shift in range(most.bit_length()))
    return (*(power for power in powers if power < most), most)


def smallest_holding(buckets: Sequence[int], size: int) -> int:
    """The smallest of the ascending `buckets` that is not below `size`. Raises ValueError if all are."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"a step of {size} is larger than the largest of {buckets[-1]}")
    return buckets[index]


def page_size(max_model_len: int, max_num_seqs: int) -> int:
    """Tokens of a KV page: a 16th of the context, and 16 for long ones; more where tables would be too large."""
    wanted = 16 if max_model_len > _LONG_CONTEXT else max_model_len / _PAGES_PER_SEQUENCE
    for size in _PAGE_SIZES:
        if size >= wanted and max_sequences(max_model_len, size) >= max_num_seqs:
            return size
    return _PAGE_SIZES[-1]


def max_sequences(max_model_len: int, page_size: int) -> int:
    """The most sequences whose block tables fit into scalar memory; at least 1."""
    return max(1, _TABLE_BYTES // (-(-max_model_len // page_size) * _INDEX_BYTES))
