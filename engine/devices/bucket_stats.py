"""Counts what a device of static shapes has run, and how much of it was padding."""

from __future__ import annotations

from msgspec import Struct

from .bucketing import Bucket


class BucketUse(Struct, frozen=True):
    """The launches of one size: `num_tokens` real ones in all, and what padding made of them."""

    phase: str  # "prompt" or "decode"; "step" where both share one
    bucket: Bucket
    num_launches: int
    num_tokens: int

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that were computed, padding and all."""
        return self.num_launches * self.bucket.num_tokens


class BucketStats(Struct, frozen=True):
    """Since the executor was made, without its warm-up.

    `num_outside` are launches that were larger than every bucket, which `uses` does not have. `num_compilations` are
    functions that were compiled after the warm-up, while people waited.
    """

    uses: tuple[BucketUse, ...]
    num_outside: int
    num_compilations: int
