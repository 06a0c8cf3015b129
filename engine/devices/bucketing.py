"""The padded sizes that a device of static shapes compiles or captures before it serves, and which one a launch takes.

Nothing here computes on a device: sizes go in, buckets come out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, log2
from operator import attrgetter
from typing import Literal, NamedTuple

Strategy = Literal["linear", "exponential"]
DecodeUnit = Literal["block", "seq"]


_tokens_of = attrgetter("num_tokens")


class Bucket(NamedTuple):
    """The padded size of a launch: sequences, tokens of each (1 in decodes), blocks of each row of the block tables."""

    batch_size: int
    query_len: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the launch computes, with padding."""
        return self.batch_size * self.query_len

    def holds(self, batch_size: int, query_len: int, width: int) -> bool:
        """Whether a launch of that size can be padded to this one."""
        return self.batch_size >= batch_size and self.query_len >= query_len and self.width >= width


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All that will be compiled or captured, each tuple in ascending order and without repetition.

    `prompts` begin at position 0. `contexts` are chunks behind a cached part: one sequence, and a table that is wider
    than its query. A block has `block_size` tokens. `decode_unit` is what the second number of a decode counts in logs
    and options: the blocks of all sequences together, or the tokens of each.
    """

    prompts: tuple[Bucket, ...]
    contexts: tuple[Bucket, ...]
    decodes: tuple[Bucket, ...]
    block_size: int = 1
    decode_unit: DecodeUnit = "block"
    _by_cost: tuple[Bucket, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_cost = sorted(self.prompts + self.contexts, key=lambda bucket: (bucket.num_tokens, bucket.width, bucket))
        object.__setattr__(self, "_by_cost", tuple(by_cost))

    @property
    def num_buckets(self) -> int:
        """How many there are of all kinds."""
        return len(self.prompts) + len(self.contexts) + len(self.decodes)

    def prompt(self, batch_size: int, query_len: int, width: int) -> Bucket | None:
        """The smallest bucket of `prompts` and `contexts` that holds a launch: least tokens, then narrowest.

        None if there is none.
        """
        for i in range(bisect_left(self._by_cost, batch_size * query_len, key=_tokens_of), len(self._by_cost)):
            if self._by_cost[i].holds(batch_size, query_len, width):
                return self._by_cost[i]
        return None

    def decode(self, batch_size: int, width: int) -> Bucket | None:
        """The smallest bucket of `decodes` that holds a launch: fewest sequences, then narrowest. None if none does."""
        for i in range(bisect_left(self.decodes, (batch_size,)), len(self.decodes)):
            if self.decodes[i].width >= width:
                return self.decodes[i]
        return None

    def decode_size(self, bucket: Bucket) -> int:
        """The second number of a decode bucket, in `decode_unit`."""
        return bucket.width * (bucket.batch_size if self.decode_unit == "block" else self.block_size)


class BucketRange(NamedTuple):
    """The sizes that a dimension is padded to. With `top`, that size is always one of them, whatever the step is."""

    min: int
    step: int
    max: int
    top: int | None = None

    def __str__(self) -> str:
        return f"[{self.min}, {self.step}, {self.max}]"


def linear(sizes: BucketRange) -> list[int]:
    """Powers of two times `min` while below `step`, then multiples of `step` up to `max`; none is below `min`.

    >>> linear(BucketRange(2, 32, 64))
    [2, 4, 8, 16, 32, 64]
    """
    doubled = (sizes.min << power for power in range(sizes.step.bit_length()))
    ramp = [size for size in doubled if size < sizes.step and size <= sizes.max]
    return ramp + [size for size in range(sizes.step, sizes.max + 1, sizes.step) if size >= sizes.min]


def exponential(sizes: BucketRange) -> list[int]:
    """Sizes that grow by one factor from `min` to `max`, rounded up to multiples of `step`; both ends are among them.

    There are at most 1 + log2(max) of them, fewer where rounding makes two the same.
    """
    spaces = ceil(log2(sizes.max)) if sizes.max > sizes.min else 0
    factor = sizes.max / sizes.min
    # Rounded first, or a power of two that came out a hair too large would end in the next step.
    exact = (round(sizes.min * factor ** (i / spaces), 6) for i in range(1, spaces))
    rounded = (ceil(size / sizes.step) * sizes.step for size in exact)
    return sorted({sizes.min, *(size for size in rounded if sizes.min < size < sizes.max), sizes.max})


_STRATEGIES: Mapping[Strategy, Callable[[BucketRange], list[int]]] = {"linear": linear, "exponential": exponential}


def sizes_of(sizes: BucketRange, strategy: Strategy) -> list[int]:
    """The sizes of a dimension in ascending order; none if the range has none."""
    values = _STRATEGIES[strategy](sizes)
    return values if sizes.top is None or sizes.top in values else sorted([*values, sizes.top])


class StepSizes(NamedTuple):
    """The largest step: tokens of a block and of a sequence, sequences, tokens, prompts (None: any number).

    With `any_width`, wide block tables cost nothing. So launches differ only in their sequences and tokens.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_seqs: int | None = None
    any_width: bool = False

    @property
    def max_width(self) -> int:
        """Blocks of the longest sequence."""
        return self.blocks(self.max_model_len)

    def blocks(self, num_tokens: int) -> int:
        """How many blocks that many tokens of a sequence take."""
        return -(-num_tokens // self.block_size)

    def prompt_width(self, query_len: int) -> int:
        """The narrowest table that a launch of prompts of that many tokens has."""
        return self.max_width if self.any_width else self.blocks(query_len)

    def allow_prompt(self, bucket: Bucket) -> bool:
        """Whether a step can have these prompts."""
        if self.max_prefill_seqs is not None and bucket.batch_size > self.max_prefill_seqs:
            return False
        return bucket.num_tokens <= self.max_num_batched_tokens

    def allow_decode(self, bucket: Bucket) -> bool:
        """Whether a step can have these decodes."""
        return bucket.num_tokens <= self.max_num_batched_tokens


class BucketRanges(NamedTuple):
    """The ranges of both dimensions of prompts and of decodes."""

    prompt_batch: BucketRange
    prompt_seq: BucketRange
    decode_batch: BucketRange
    decode_size: BucketRange
    decode_unit: DecodeUnit


class LeftOut(NamedTuple):
    """How many buckets of the ranges no step can use: prompts of too many tokens, and decodes of too wide a table."""

    prompts: int
    decodes: int


def plan_of_ranges(ranges: BucketRanges, strategy: Strategy, sizes: StepSizes) -> tuple[BucketPlan, LeftOut]:
    """The buckets of all pairs of sizes, less those that no step can use.

    A decode whose table would be wider than the longest sequence's has that one's width.
    """
    pairs = [
        Bucket(batch_size, query_len, sizes.prompt_width(query_len))
        for batch_size in sizes_of(ranges.prompt_batch, strategy)
        for query_len in sizes_of(ranges.prompt_seq, strategy)
    ]
    prompts = list(filter(sizes.allow_prompt, pairs))
    contexts = {b for query_len in {b.query_len for b in prompts} for b in _with_context(query_len, sizes)}
    tokens = sizes.block_size if ranges.decode_unit == "seq" else None
    decode_pairs = [
        Bucket(batch_size, 1, min(-(-size // (tokens or batch_size)), sizes.max_width))
        for batch_size in sizes_of(ranges.decode_batch, strategy)
        for size in sizes_of(ranges.decode_size, strategy)
    ]
    decodes = set(filter(sizes.allow_decode, decode_pairs))
    plan = BucketPlan(
        ascending(prompts),
        ascending(contexts.difference(prompts)),
        ascending(decodes),
        sizes.block_size,
        ranges.decode_unit,
    )
    return plan, LeftOut(len(pairs) - len(prompts), len(decode_pairs) - len(decodes))


def _with_context(query_len: int, sizes: StepSizes) -> Iterator[Bucket]:
    """Widths that double from the query's own up to the longest sequence's."""
    width = sizes.prompt_width(query_len)
    yield Bucket(1, query_len, width)
    while width < sizes.max_width:
        width = min(2 * width, sizes.max_width)
        yield Bucket(1, query_len, width)


def ascending(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    """The buckets in the order of a plan."""
    return tuple(sorted(buckets))
