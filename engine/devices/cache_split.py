"""How the memory of the cache is split among its groups, and between them and recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ..errors import DeviceError

BLOCK_TOKENS = 16
"""Tokens of a KV block on the devices whose cache lies in the machine's memory."""


class GroupBytes(Struct, frozen=True):
    """The bytes of one token in all layers of a cache group. `window` is as in CacheGroup."""

    window: int | None
    bytes_per_token: int


_MORE_SNAPSHOTS = 8  # beside one for each sequence
_MAX_BLOCKS_WITHOUT_KV = 1 << 16


class StateSplit(Struct, frozen=True):
    """Slots of recurrent state: `num_states` of `state_bytes`, for up to `max_num_seqs` sequences and for snapshots."""

    state_bytes: int
    num_states: int
    max_num_seqs: int

    @property
    def num_bytes(self) -> int:
        """What all slots take."""
        return self.num_states * self.state_bytes

    @classmethod
    def within(cls, cache_bytes: int, state_bytes: int, max_num_seqs: int, *, beside_kv: bool = True) -> StateSplit:
        """As many slots as are of use, in at most half of the cache, or in all of it where no K and V lie beside them.

        Of use are one for each sequence, as many for snapshots, and a few more. Where there are fewer, at least a
        quarter is for snapshots: without them, what a prompt has in common with others is computed again. Raises
        DeviceError if there is not room for a sequence and a snapshot. No slots for models without recurrent layers.
        """
        if state_bytes == 0:
            return cls(0, 0, max_num_seqs)
        room, part = (cache_bytes // 2, "half") if beside_kv else (cache_bytes, "all")
        num_states = min(max_states(max_num_seqs), room // state_bytes)
        if num_states < 2:
            raise DeviceError(
                f"a KV cache of {cache_bytes} bytes, {part} of it for recurrent state, holds {num_states} states of "
                f"{state_bytes} bytes, and at least 2 are needed; raise --kv-cache-space"
            )
        return cls(state_bytes, num_states, min(max_num_seqs, max(num_states * 3 // 4, 1)))

    @classmethod
    def whole(cls, state_bytes: int, max_num_seqs: int) -> StateSplit:
        """All slots that are of use, however much memory they take."""
        return cls(state_bytes, max_states(max_num_seqs) if state_bytes else 0, max_num_seqs)


def max_states(max_num_seqs: int) -> int:
    """How many slots of recurrent state are of use."""
    return 2 * max_num_seqs + _MORE_SNAPSHOTS


def keeps_kv(groups: Sequence[GroupBytes]) -> bool:
    """Whether tokens leave anything in the cache; not in models that have recurrent layers alone."""
    return any(group.bytes_per_token for group in groups)


def blocks_without_kv(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """How many blocks there are where they take no memory.

    They say which tokens a sequence has, for the prefix cache: enough for the longest sequence, and for as many as
    there may be and what they leave behind, as far as the books stay small.
    """
    longest = -(-max_model_len // block_size)
    return max(longest, min(2 * max_num_seqs * longest, _MAX_BLOCKS_WITHOUT_KV))


class CacheSplit(Struct, frozen=True):
    """The groups, the first one first, in blocks of `block_size` tokens.

    A group with a window behind the first has as many blocks as it can ever use with `max_num_seqs` sequences and
    `max_num_batched_tokens` a step, or as many as the first group where that is less. The first group has the rest.
    """

    groups: Sequence[GroupBytes]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def blocks(self, kv_cache_bytes: int) -> list[int]:
        """How many blocks each group has. Raises DeviceError if there is not even one of each."""
        first = self.first_blocks(kv_cache_bytes)
        if first < 1:
            block_bytes = self.bytes_with(1)
            raise DeviceError(
                f"a KV cache of {kv_cache_bytes} bytes holds no block of {block_bytes} bytes; raise --kv-cache-space"
            )
        return self.beside(first)

    def beside(self, first: int) -> list[int]:
        """How many blocks each group has if the first group has `first`."""
        return [first, *(min(first, count) for count in self._window_blocks())]

    def first_blocks(self, kv_cache_bytes: int) -> int:
        """How many blocks the first group has."""
        left, shared = kv_cache_bytes, self.bytes_with(1)
        for count, group in sorted(zip(self._window_blocks(), self.groups[1:], strict=True), key=lambda pair: pair[0]):
            if left // shared < count:
                break
            size = group.bytes_per_token * self.block_size
            left, shared = left - count * size, shared - size
        return left // shared

    def bytes_with(self, num_blocks: int) -> int:
        """What all groups take if the first has `num_blocks`."""
        first, *others = self.groups
        tokens = num_blocks * first.bytes_per_token
        tokens += sum(
            min(num_blocks, count) * group.bytes_per_token
            for count, group in zip(self._window_blocks(), others, strict=True)
        )
        return tokens * self.block_size

    def first_blocks_of(self, num_seqs: int, num_tokens: int, num_batched_tokens: int) -> int:
        """How many blocks of the first group sequences of `num_tokens` need, `num_batched_tokens` being in a step."""
        whole, window = num_seqs * -(-num_tokens // self.block_size), self.groups[0].window
        return whole if window is None else min(whole, self._held(window, num_seqs, num_batched_tokens))

    def _window_blocks(self) -> list[int]:
        return [
            self._held(group.window, self.max_num_seqs, self.max_num_batched_tokens)
            for group in self.groups[1:]
            if group.window is not None
        ]

    def _held(self, window: int, num_seqs: int, num_batched_tokens: int) -> int:
        """The most blocks that sequences hold of a window's group: they are freed where the next block is full."""
        seen = -(-(window - 1) // self.block_size) + 1
        return num_seqs * (seen + 2) + -(-num_batched_tokens // self.block_size)
