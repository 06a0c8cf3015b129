"""Autoscaling by waits: as many replicas as the tightest target needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidewheel.engine.errors import TidewheelError
from tidewheel.ray.autoscaling import PREFILL_S, WAITING, WaitPolicy
from tidewheel.ray.settings import read_settings

POLICY = WaitPolicy(target_ongoing_requests=16, target_wait_s=5, target_waiting_requests=8)


@pytest.mark.parametrize(
    ("ongoing", "waiting", "prefill_s", "replicas"),
    [
        (0, 0, 0, 0),  # which Serve makes min_replicas
        (1, 0, 0, 1),
        (40, 0, 0, 3),  # all run, and none waits
        (40, 30, 1, 4),  # short prompts; many wait
        (8, 6, 23, 5),  # few prompts, which are long
        (8, 6, 4.9, 1),
        (64, 32, 20, 4),  # exactly what four may have
    ],
)
def test_the_tightest_target_decides(ongoing: float, waiting: float, prefill_s: float, replicas: int) -> None:
    assert POLICY.replicas(ongoing, waiting, prefill_s) == replicas


@pytest.mark.parametrize(
    ("metrics", "queued", "replicas"),
    [
        ({WAITING: {"a": 9.0, "b": 8.0}, PREFILL_S: {"a": 1.0, "b": 2.0}}, 0, 3),
        ({WAITING: {"a": 1.0, "b": 0.0}, PREFILL_S: {"a": 20.0, "b": 1.0}}, 0, 5),
        ({WAITING: {"a": 1.0, "b": 0.0}}, 24, 4),  # in the proxies, while nothing is known of the device
        ({}, None, 1),  # before a replica has said anything
        (None, None, 1),
    ],
)
def test_what_replicas_and_proxies_say_is_added_up(metrics: Any, queued: float | None, replicas: int) -> None:
    context = SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, total_num_requests=10.0)
    assert POLICY(context) == (replicas, {})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"autoscaling": "wait"}, "autoscaling=wait needs max_replicas"),
        ({"autoscaling": "magic", "max_replicas": "2"}, "autoscaling must be one of ongoing, wait"),
        ({"autoscaling": "wait", "max_replicas": "2", "target_wait_s": "0"}, "target_wait_s must be more than 0"),
        ({"max_replicas": "2", "target_wait_s": "3"}, "target_wait_s has no effect without autoscaling=wait"),
        ({"downscale_delay_s": "3"}, "downscale_delay_s has no effect without max_replicas"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, str], said: str) -> None:
    with pytest.raises(TidewheelError, match=said):
        read_settings(settings)
