"""The buckets that the options mean for a model, with the lines of the log that tell them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import DeviceError
from ..bucket_file import plan_of_file
from ..bucketing import BucketPlan, BucketRange, BucketRanges, LeftOut, StepSizes, plan_of_ranges, sizes_of
from .options import GraphOptions

_MAX_PROMPTS = 64
_BATCH_STEP = 32
_MIN_MAX_BLOCKS = 128
_MANY = 500  # buckets: at a second each they take more than eight minutes to compile
_ENDS = 8  # buckets shown of each end of a longer list

logger = logging.getLogger(__name__)


def plan_buckets(options: GraphOptions, sizes: StepSizes) -> BucketPlan:
    """The padded sizes of all launches. Raises DeviceError for options that leave prompts or decodes without any."""
    if options.bucketing_file is not None:
        plan, left_out = _read(options.bucketing_file, sizes)
        logger.info("The buckets are those of %s", options.bucketing_file)
        _log_prompts(plan, left_out, sizes)
        _log_decodes(plan, left_out, sizes)
        return plan
    ranges = bucket_ranges(options, sizes)
    plan, left_out = plan_of_ranges(ranges, options.bucketing, sizes)
    for phase, buckets, bounds in (("prompt", plan.prompts, ranges[:2]), ("decode", plan.decodes, ranges[2:4])):
        if not buckets:
            batch, size = bounds
            raise DeviceError(
                f"no {phase} bucket of bs:{batch} and {size} fits a step of {sizes.max_num_batched_tokens} tokens: "
                f"lower --{phase}-bs-bucket-min and the other minimum, or raise --max-num-batched-tokens"
            )
    logger.info("Prompt bucket config (min, step, max_warmup) bs:%s, seq:%s", *ranges[:2])
    _log_prompts(plan, left_out, sizes)
    logger.info("Decode bucket config (min, step, max_warmup) bs:%s, %s:%s", ranges[2], ranges.decode_unit, ranges[3])
    _log_decodes(plan, left_out, sizes)
    if options.bucketing == "linear" and plan.num_buckets > _MANY:
        other = replace(options, bucketing="exponential")
        fewer, _ = plan_of_ranges(bucket_ranges(other, sizes), "exponential", sizes)
        logger.warning(
            "%d buckets take a long time to compile and capture; --bucketing exponential makes only %d",
            plan.num_buckets,
            fewer.num_buckets,
        )
    return plan


def bucket_ranges(options: GraphOptions, sizes: StepSizes) -> BucketRanges:
    """The ranges of the options, with their defaults. Raises DeviceError for an empty range.

    Where no maximum is given, the most that a step can have is one of the sizes.
    """
    block_size, max_seqs, max_tokens = sizes.block_size, sizes.max_num_seqs, sizes.max_num_batched_tokens
    # Doubling needs no step: rounded to one, a batch of two would be padded to it.
    step = 1 if options.bucketing == "exponential" else min(max_seqs, _BATCH_STEP)
    max_prompts = min(max_seqs, sizes.max_prefill_seqs or _MAX_PROMPTS, _MAX_PROMPTS)
    longest = min(sizes.max_model_len, max_tokens)
    max_blocks = max(_MIN_MAX_BLOCKS, max_seqs * sizes.max_width)
    unit = options.decode_unit
    most = sizes.max_model_len if unit == "seq" else max_blocks
    fewest = most if sizes.any_width else block_size
    return BucketRanges(
        _range(options, "prompt_bs", BucketRange(1, step, max_prompts)),
        _range(options, "prompt_seq", BucketRange(block_size, block_size, sizes.max_model_len, longest)),
        _range(options, "decode_bs", BucketRange(1, step, max_seqs, min(max_seqs, max_tokens))),
        _range(options, f"decode_{unit}", BucketRange(fewest, block_size, most, most)),
        unit,
    )


def _range(options: GraphOptions, name: str, default: BucketRange) -> BucketRange:
    """The given values of a range, or the default's. A default minimum is lowered to a given maximum below it."""
    flag = f"--{name.replace('_', '-')}-bucket"
    low, step, high = options.bounds(name)
    most = default.max if high is None else high
    if low is not None and low > most:
        raise DeviceError(f"{flag}-min {low} is more than {flag}-max, which is {most} here")
    found = BucketRange(
        min(default.min, most) if low is None else low,
        step or default.step,
        most,
        default.top if high is None else None,
    )
    if not sizes_of(found, options.bucketing):
        raise DeviceError(f"{flag}-min, -step and -max {found} leave no size: no multiple of the step is between them")
    return found


def _read(name: str, sizes: StepSizes) -> tuple[BucketPlan, LeftOut]:
    try:
        lines = Path(name).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"--bucketing-file {name} cannot be read: {error}") from None
    return plan_of_file(name, lines, sizes)


def _log_prompts(plan: BucketPlan, left_out: LeftOut, sizes: StepSizes) -> None:
    prompts = [(bucket.batch_size, bucket.query_len) for bucket in plan.prompts]
    logger.info("Generated %d prompt buckets: %s", len(prompts), listed(prompts))
    if plan.contexts:
        contexts = [tuple(bucket) for bucket in plan.contexts]
        logger.info("Generated %d context buckets (bs, seq, blocks): %s", len(contexts), listed(contexts))
    if left_out.prompts:
        logger.info(
            "Left out %d prompt buckets that are more than a step: %d tokens%s",
            left_out.prompts,
            sizes.max_num_batched_tokens,
            "" if sizes.max_prefill_seqs is None else f" and {sizes.max_prefill_seqs} prompts",
        )


def _log_decodes(plan: BucketPlan, left_out: LeftOut, sizes: StepSizes) -> None:
    decodes = [(bucket.batch_size, plan.decode_size(bucket)) for bucket in plan.decodes]
    logger.info("Generated %d decode buckets: %s", len(decodes), listed(decodes))
    if left_out.decodes:
        logger.info(
            "Left out %d decode buckets that no step needs: a sequence has at most %d blocks, a step %d tokens",
            left_out.decodes,
            sizes.max_width,
            sizes.max_num_batched_tokens,
        )


def listed(buckets: Sequence[tuple[int, ...]]) -> str:
    """The sizes of buckets for the log: all of them, or both ends of a long list."""
    if len(buckets) <= _MANY:
        return str(list(buckets))
    return f"[{', '.join(map(str, buckets[:_ENDS]))}, ..., {', '.join(map(str, buckets[-_ENDS:]))}]"
