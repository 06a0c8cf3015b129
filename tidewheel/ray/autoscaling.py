"""How many replicas there should be, by how long requests wait. Delays and bounds are Serve's own.

Nothing here knows of Ray: Serve sends a copy of this file to its controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WAITING = "waiting"
"""What replicas record under this name: sequences that wait for the engine."""
PREFILL_S = "prefill_s"
"""The same for the seconds that it will take to compute what is left of all prompts."""


class WaitPolicy:
    """A policy of Serve's autoscaling.

    There are as many replicas as three targets need: requests of each, running and waiting; seconds that a prompt which
    comes now waits for those before it; and requests that wait at each.
    """

    def __init__(self, target_ongoing_requests: float, target_wait_s: float, target_waiting_requests: float) -> None:
        self._ongoing, self._wait_s, self._waiting = target_ongoing_requests, target_wait_s, target_waiting_requests

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number that Serve's AutoscalingContext calls for, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waiting = sum(metrics.get(WAITING, {}).values()) + (context.total_queued_requests or 0.0)
        prefill_s = sum(metrics.get(PREFILL_S, {}).values())
        return self.replicas(context.total_num_requests, waiting, prefill_s), {}

    def replicas(self, ongoing: float, waiting: float, prefill_s: float) -> int:
        """The number for `ongoing` and `waiting` requests of all replicas, and `prefill_s` seconds of their prompts."""
        needed = (ongoing / self._ongoing, waiting / self._waiting, prefill_s / self._wait_s)
        return math.ceil(max(needed))
