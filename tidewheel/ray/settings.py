"""The settings of the replicas for Ray Serve: how many, with how many cores, and where requests go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidewheel.engine.errors import TidewheelError

ROUTERS = ("prefix", "power-of-two")
AUTOSCALING = ("ongoing", "wait")
_OF_WAITING = ("target_wait_s", "target_waiting_requests")
_OF_AUTOSCALING = ("target_ongoing_requests", "upscale_delay_s", "downscale_delay_s")


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How replicas are placed and chosen.

    `num_cpus` are the cores of each replica, which it has to itself unless `bind_cores` is off. With `max_replicas`,
    Serve starts and stops replicas between `min_replicas` and that number, so that each has `target_ongoing_requests`
    requests. `autoscaling` "wait" starts more, if the prompts that wait would take longer than `target_wait_s`, or if
    more than `target_waiting_requests` wait at each replica. Requests beyond `max_ongoing_requests` wait in Serve's
    proxy. `router` "prefix" sends a conversation where its prefix lies, within `most_load` times the mean load: see
    `PrefixPolicy`. Times are in seconds.
    """

    num_replicas: int | None = None
    num_cpus: int = 1
    memory_gib: float | None = None
    bind_cores: bool = True
    min_replicas: int | None = None
    max_replicas: int | None = None
    autoscaling: str = "ongoing"
    target_ongoing_requests: float = 16
    target_wait_s: float = 5
    target_waiting_requests: float = 8
    upscale_delay_s: float = 30
    downscale_delay_s: float = 600
    max_ongoing_requests: int = 1024
    router: str = "prefix"
    most_load: float = 1.5
    routing_stats_period_s: float = 5
    health_check_period_s: float = 10

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_cpus", "max_replicas", "max_ongoing_requests"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        positive = "target_ongoing_requests target_wait_s target_waiting_requests".split()
        for name in (*positive, "routing_stats_period_s", "health_check_period_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.most_load < 1:
            raise ValueError(f"most_load must be at least 1, the mean of all replicas, got {self.most_load:g}")
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        if self.autoscaling not in AUTOSCALING:
            raise ValueError(f"autoscaling must be one of {', '.join(AUTOSCALING)}, got {self.autoscaling!r}")
        if self.autoscaling != "ongoing" and self.max_replicas is None:
            raise ValueError(f"autoscaling={self.autoscaling} needs max_replicas")
        if self.min_replicas is not None and self.max_replicas is None:
            raise ValueError("min_replicas needs max_replicas")
        if self.max_replicas is not None:
            if self.num_replicas is not None:
                raise ValueError("give num_replicas, or min_replicas and max_replicas, not both")
            if not 0 <= (self.min_replicas or 0) <= self.max_replicas:
                raise ValueError(f"min_replicas must be between 0 and {self.max_replicas}, got {self.min_replicas}")

    @property
    def is_several(self) -> bool:
        """Whether there may be more than one replica at a time."""
        return max(self.num_replicas or 1, self.max_replicas or 1) > 1


def read_settings(arguments: Mapping[str, Any]) -> tuple[ReplicaSettings, dict[str, Any]]:
    """The settings among an application's arguments, which may all be texts, and the arguments that are left.

    Raises TidewheelError, saying which setting cannot be used.
    """
    names = {field.name for field in msgspec.structs.fields(ReplicaSettings)}
    ours = {name.replace("-", "_"): value for name, value in arguments.items() if name.replace("-", "_") in names}
    rest = {name: value for name, value in arguments.items() if name.replace("-", "_") not in names}
    if isinstance(ours.get("num_cpus"), float) and ours["num_cpus"].is_integer():
        ours["num_cpus"] = int(ours["num_cpus"])
    try:
        settings = msgspec.convert(ours, ReplicaSettings, strict=False)
    except msgspec.ValidationError as error:
        raise TidewheelError(f"the replicas' settings cannot be used: {error}") from error
    idle = (
        [] if settings.autoscaling == "wait" else [(name, "autoscaling=wait") for name in _OF_WAITING if name in ours]
    )
    if settings.max_replicas is None:
        idle += [(name, "max_replicas") for name in _OF_AUTOSCALING if name in ours]
    if idle:
        reasons = "; ".join(f"{name} has no effect without {needed}" for name, needed in idle)
        raise TidewheelError(f"the replicas' settings cannot be used: {reasons}")
    return settings, rest
