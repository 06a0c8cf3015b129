"""The options that all devices with graphs have: buckets, and what is captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from ...declaring.option import Options, listed, option
from ...declaring.record import record
from ...declaring.values import at_least, between, count, number
from ..bucketing import DecodeUnit, Strategy

CaptureStrategy = Literal["min_tokens", "max_bs"]

_STRATEGY_ALIASES = {"lin": "linear", "exp": "exponential", "false": "linear", "true": "exponential"}


def _bound(help_text: str, variable: str, *more: str) -> int | None:
    """A bound of a range. None: it depends on the model and on other options."""
    bound: int | None = option(
        None, help_text, parse=count, check=at_least(1), metavar="N", env_aliases=(f"VLLM_{variable}", *more)
    )
    return bound


@record(frozen=True)
class GraphOptions(Options):
    """The sizes to compile before the device serves, and the memory for graphs. Bounds are None by default."""

    bucketing: Strategy = option(
        "linear",
        "how the sizes between min and max are chosen",
        parse=lambda text: _STRATEGY_ALIASES.get(text.lower(), text),
        choices=get_args(Strategy),
        env_aliases=("VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING"),
    )
    bucketing_file: str | None = option(
        None, "read the buckets from this file", metavar="FILE", env_aliases=("VLLM_BUCKETING_FROM_FILE",)
    )
    prompt_bs_bucket_min: int | None = _bound("fewest prompts of a bucket [1]", "PROMPT_BS_BUCKET_MIN")
    prompt_bs_bucket_step: int | None = _bound(
        "difference in prompts between buckets [--max-num-seqs, at most 32]", "PROMPT_BS_BUCKET_STEP"
    )
    prompt_bs_bucket_max: int | None = _bound(
        "most prompts of a bucket [--max-num-seqs, at most 64]", "PROMPT_BS_BUCKET_MAX"
    )
    prompt_seq_bucket_min: int | None = _bound(
        "fewest tokens of a prompt's bucket [a block]", "PROMPT_SEQ_BUCKET_MIN", "VLLM_PROMPT_QUERY_BUCKET_MIN"
    )
    prompt_seq_bucket_step: int | None = _bound(
        "difference in tokens between buckets [a block]", "PROMPT_SEQ_BUCKET_STEP", "VLLM_PROMPT_QUERY_BUCKET_STEP"
    )
    prompt_seq_bucket_max: int | None = _bound(
        "most tokens of a prompt's bucket [the context]", "PROMPT_SEQ_BUCKET_MAX", "VLLM_PROMPT_QUERY_BUCKET_MAX"
    )
    decode_bs_bucket_min: int | None = _bound("fewest sequences of a decode's bucket [1]", "DECODE_BS_BUCKET_MIN")
    decode_bs_bucket_step: int | None = _bound(
        "difference in sequences between buckets [--max-num-seqs, at most 32]", "DECODE_BS_BUCKET_STEP"
    )
    decode_bs_bucket_max: int | None = _bound(
        "most sequences of a decode's bucket [--max-num-seqs]", "DECODE_BS_BUCKET_MAX"
    )
    decode_block_bucket_min: int | None = _bound(
        "fewest KV blocks of a decode's bucket, of all its sequences together [as many as a block has tokens]",
        "DECODE_BLOCK_BUCKET_MIN",
    )
    decode_block_bucket_step: int | None = _bound(
        "difference in KV blocks between buckets [as many as a block has tokens]", "DECODE_BLOCK_BUCKET_STEP"
    )
    decode_block_bucket_max: int | None = _bound(
        "most KV blocks of a decode's bucket [those of --max-num-seqs sequences, at least 128]",
        "DECODE_BLOCK_BUCKET_MAX",
    )
    decode_seq_bucket_min: int | None = _bound(
        "instead of blocks: fewest tokens of each sequence of a decode's bucket [a block]", "DECODE_SEQ_BUCKET_MIN"
    )
    decode_seq_bucket_step: int | None = _bound(
        "instead of blocks: difference in tokens between buckets [a block]", "DECODE_SEQ_BUCKET_STEP"
    )
    decode_seq_bucket_max: int | None = _bound(
        "instead of blocks: most tokens of each sequence of a decode's bucket [the context]", "DECODE_SEQ_BUCKET_MAX"
    )
    graph_reserved_mem: float = option(
        0.1,
        "the part for graphs of the memory that --gpu-memory-utilization allows; the KV cache gets the rest",
        parse=number,
        check=between(0, 1),
        metavar="FRACTION",
        env_aliases=("VLLM_GRAPH_RESERVED_MEM",),
    )
    graph_prompt_ratio: float = option(
        0.3,
        "the part of the graphs' memory that is for prompts",
        parse=number,
        check=between(0, 1),
        metavar="FRACTION",
        env_aliases=("VLLM_GRAPH_PROMPT_RATIO",),
    )
    graph_prompt_strategy: CaptureStrategy = option(
        "min_tokens",
        "which graphs of prompts are captured first",
        choices=get_args(CaptureStrategy),
        env_aliases=("VLLM_GRAPH_PROMPT_STRATEGY",),
    )
    graph_decode_strategy: CaptureStrategy = option(
        "max_bs",
        "which graphs of decodes are captured first",
        choices=get_args(CaptureStrategy),
        env_aliases=("VLLM_GRAPH_DECODE_STRATEGY",),
    )
    skip_warmup: bool = option(
        False, "compile during serving, and capture no graphs", env_aliases=("VLLM_SKIP_WARMUP",)
    )
    enforce_eager: bool = option(False, "capture no graphs")
    max_seq_len_to_capture: int | None = option(
        None,
        "sequences longer than this run without graphs [no limit]",
        parse=count,
        check=at_least(1),
        metavar="TOKENS",
    )

    @property
    def decode_unit(self) -> DecodeUnit:
        """The unit of decodes' second dimension: blocks of all sequences, or tokens of each."""
        return "block" if self.bounds("decode_seq") == (None, None, None) else "seq"

    @property
    def captures(self) -> bool:
        """Whether graphs are wanted."""
        return not (self.enforce_eager or self.skip_warmup)

    def bounds(self, name: str) -> tuple[int | None, int | None, int | None]:
        """The given minimum, step and maximum of a range, such as prompt_bs."""
        low, step, high = (getattr(self, field) for field in _bounds_of(name))
        return low, step, high

    def without_effect(self, *, captures: bool, budgeted: bool) -> Iterator[str]:
        """Texts about options without effect, because no graphs are captured or there is no memory plan."""
        idle = [] if captures else self.given_flags(_GRAPH_FIELDS)
        yield from (f"{flag} has no effect: no graphs are captured" for flag in idle)
        for flag in () if budgeted else self.given_flags(_MEMORY_FIELDS):
            if flag not in idle:
                yield f"{flag} has no effect: the device has no memory of its own"

    def _contradictions(self) -> Iterator[str]:
        for name in _RANGES:
            low, _, high = self.bounds(name)
            if low is not None and high is not None and low > high:
                flag = f"--{name.replace('_', '-')}-bucket"
                yield f"{flag}-min {low} is more than {flag}-max {high}"
        blocks, tokens = (self.differing_flags(_bounds_of(name)) for name in ("decode_block", "decode_seq"))
        if blocks and tokens:
            yield (
                f"{blocks[0]} counts the blocks of all sequences and {tokens[0]} the tokens of each: give one of the "
                "two"
            )
        given = self.differing_flags(["bucketing", *(field for name in _RANGES for field in _bounds_of(name))])
        if self.bucketing_file is not None and given:
            yield f"--bucketing-file has all buckets: leave out {listed(given)}"


_RANGES = ("prompt_bs", "prompt_seq", "decode_bs", "decode_block", "decode_seq")
_GRAPH_FIELDS = (
    "graph_reserved_mem",
    "graph_prompt_ratio",
    "graph_prompt_strategy",
    "graph_decode_strategy",
    "max_seq_len_to_capture",
)
_MEMORY_FIELDS = ("graph_reserved_mem", "graph_prompt_ratio")


def _bounds_of(name: str) -> list[str]:
    return [f"{name}_bucket_{bound}" for bound in ("min", "step", "max")]
