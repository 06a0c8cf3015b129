"""Limits on what clients may ask for and how long they may take: see `connections` and `admission`."""

from __future__ import annotations

from tidewheel.engine.declaring.option import Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.declaring.values import at_least, count, number_or_none


@record(frozen=True, kw_only=True)
class ConnectionLimits(Options):
    """Sizes in bytes, times in seconds; None is no limit.

    A request must arrive within `read_timeout_s`. Each 500 bytes of it give a second back. A client that
    leaves the write buffer full for `write_timeout_s` is dropped.
    """

    max_header_bytes: int = option(
        64 * 2**10,
        "largest head of a request in bytes",
        flag="--max-header-size",
        parse=count,
        check=at_least(1),
        metavar="BYTES",
        flag_aliases=("--h11-max-incomplete-event-size",),
    )
    max_header_count: int = option(
        256,
        "most headers of a request",
        parse=count,
        check=at_least(1),
        metavar="N",
        flag_aliases=("--h11-max-header-count",),
    )
    read_timeout_s: float | None = option(
        30.0,
        "how long a request may take to arrive; each 500 bytes that arrive add a second; 0 is no limit",
        flag="--read-timeout",
        parse=number_or_none,
        check=at_least(0),
        metavar="SECONDS",
    )
    write_timeout_s: float | None = option(
        60.0,
        "how long a client may leave its answer unread; 0 is no limit",
        flag="--write-timeout",
        parse=number_or_none,
        check=at_least(0),
        metavar="SECONDS",
    )


@record(frozen=True, kw_only=True)
class AdmissionLimits(Options):
    """What requests may ask for. None is no limit.

    `max_queue` counts sequences: a request has `n` of them for each prompt. `max_answer_bytes` limits the longest
    answer that a request could get.
    """

    max_queue: int | None = option(
        4096,
        "most sequences that may wait, by an estimate of what fits into the KV cache; further requests get a 429",
        parse=count,
        check=at_least(0),
        metavar="N",
    )
    max_prompts: int = option(
        1024,
        "most prompts of one request",
        parse=count,
        check=at_least(1),
        metavar="N",
        env_aliases=("VLLM_MAX_COMPLETION_PROMPTS",),
    )
    max_n: int = option(
        128,
        "most choices (n, best_of) of one prompt",
        parse=count,
        check=at_least(1),
        metavar="N",
        env_aliases=("VLLM_MAX_N_SEQUENCES",),
    )
    max_answer_bytes: int = option(
        64 * 2**20,
        "largest answer in bytes, e.g. 64M, by an estimate from a request's prompts, tokens, choices and logprobs",
        flag="--max-answer-size",
        parse=count,
        check=at_least(1),
        metavar="BYTES",
    )
    request_timeout_s: float | None = option(
        None,
        "how long an answer may take, from the request's arrival [no limit]",
        flag="--request-timeout",
        parse=number_or_none,
        check=at_least(0),
        metavar="SECONDS",
    )
