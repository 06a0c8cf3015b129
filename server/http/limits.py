"""Limits on what clients may ask for and how long they may take, as plain data: see `connections` and `admission`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Sizes in bytes, times in seconds; None is no limit.

    A request must have come in after `read_timeout_s`, and one more second for each 500 bytes of it. A client that
    lets the write buffer stay full for `write_timeout_s` is dropped.
    """

    max_header_bytes: int = 64 * 2**10
    max_header_count: int = 256
    read_timeout_s: float | None = 30.0
    write_timeout_s: float | None = 60.0


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """What requests may ask for. None is no limit; `max_queue` counts sequences, of which a request has n a prompt.

    `max_answer_bytes` is for an answer as long as it may become.
    """

    max_queue: int | None = 4096
    max_prompts: int = 1024
    max_n: int = 128
    max_answer_bytes: int = 64 * 2**20
    request_timeout_s: float | None = None
