"""How much of what a device of static shapes computed was padding."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.engine.devices.executor import Executor

from . import text


@dataclass(frozen=True, slots=True)
class BucketResult:
    """The launches of one bucket, which is a number of sequences, of tokens of each, and of KV blocks of each.

    `tokens` are real, `padded_tokens` are all that were computed, and `waste` is the part of these that is padding.
    """

    phase: str
    sequences: int
    query_tokens: int
    blocks: int
    launches: int
    tokens: int
    padded_tokens: int
    waste: float


@dataclass(frozen=True, slots=True)
class Padding:
    """All buckets that were used. `outside` are launches that were larger than all of them.

    `compilations` are those that took place after the warm-up.
    """

    buckets: list[BucketResult]
    outside: int
    compilations: int


def padding_of(executor: Executor) -> Padding | None:
    """What an executor counted; None if it pads nothing."""
    stats = executor.stats()
    if stats is None:
        return None
    buckets = [
        BucketResult(
            use.phase,
            *use.bucket,
            launches=use.num_launches,
            tokens=use.num_tokens,
            padded_tokens=use.num_padded_tokens,
            waste=1 - use.num_tokens / use.num_padded_tokens,
        )
        for use in stats.uses
    ]
    return Padding(buckets, stats.num_outside, stats.num_compilations)


def render_padding(padding: Padding) -> str:
    """A table of the buckets, and what did not go by them."""
    rows = [["phase", "sequences", "tokens", "blocks", "launches", "padding"]]
    for used in padding.buckets:
        sizes = [str(size) for size in (used.sequences, used.query_tokens, used.blocks, used.launches)]
        rows.append([used.phase, *sizes, text.share(used.waste)])
    counts = f"{padding.outside} launches were larger than all buckets, {padding.compilations} compilations"
    return f"Padding by bucket\n{text.table(rows)}  {counts} after the warm-up\n"
