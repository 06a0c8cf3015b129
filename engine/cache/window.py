"""Window: which blocks the tokens of a sliding window see."""

from __future__ import annotations

from msgspec import Struct


class Window(Struct, frozen=True):
    """The cache group number `group`, whose tokens see themselves and the `size - 1` tokens before them."""

    group: int
    size: int
    block_size: int

    def first_block(self, position: int) -> int:
        """The first block that the token at `position` sees, and so do those after it."""
        return max(position - self.size + 1, 0) // self.block_size

    def max_blocks(self, num_tokens: int) -> int:
        """How many blocks a run of `num_tokens` tokens may see, wherever it begins."""
        return (self.size + num_tokens + self.block_size - 3) // self.block_size + 1
