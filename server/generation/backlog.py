"""How many may wait, and what those are answered that come too late or wait too long."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from http import HTTPStatus

from ..errors import ApiError
from ..http.clients import current_client

_RATE_WINDOW_S = 30.0
_LONGEST_RETRY_S = 60


class EndRate:
    """How many sequences end per second, averaged over about half a minute."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = time.monotonic()

    def add(self, count: int) -> None:
        """Note that `count` sequences have ended."""
        self._rate = self._decayed() + count / _RATE_WINDOW_S
        self._at = time.monotonic()

    def retry_after_s(self, excess: int) -> int:
        """Whole seconds until `excess` more will have ended at this rate."""
        rate = self._decayed()
        return min(max(math.ceil(excess / rate), 1), _LONGEST_RETRY_S) if rate > 0 else 1

    def _decayed(self) -> float:
        return self._rate * math.exp((self._at - time.monotonic()) / _RATE_WINDOW_S)


def check_backlog(
    backlog: int, max_queue: int | None, rate: EndRate, *, held: Mapping[str, int] | None = None, count: int = 0
) -> None:
    """Raises ApiError (429) if too many wait in a queue other than the chat model's. None is no limit.

    If it is known what each client has `held` of the queue, a request for `count` more is let in as by Admission.
    """
    if max_queue is None or backlog <= max_queue:
        return
    if held is None or not has_part(held, current_client(), count, backlog, max_queue):
        raise queue_full(max_queue, rate.retry_after_s(backlog - max_queue))


def has_part(held: Mapping[str, int], client: str, count: int, waiting: int, max_queue: int) -> bool:
    """Whether a full queue still takes `count` more of a client, so that one client cannot keep the others out."""
    own = held.get(client, 0)
    num_clients = len(held) + (not own)
    return waiting <= 2 * max_queue and (own + count) * num_clients <= max_queue


def request_timeout() -> ApiError:
    """The error of a request that has taken longer than `--request-timeout`."""
    return ApiError(
        HTTPStatus.GATEWAY_TIMEOUT,
        "the answer was not complete within this server's time limit (--request-timeout)",
        code="request_timeout",
    )


def queue_full(max_queue: int, retry_after_s: int) -> ApiError:
    """The error of a request that would wait behind too many others."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"the server is busy: {max_queue} requests wait already (--max-queue); try again later",
        code="queue_full",
        headers={"retry-after": str(retry_after_s)},
    )
