"""From options to an application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.options.serve import ServeOptions

from .cluster import own_environment
from .deployment import TidewheelServer
from .direct import IS_DIRECT, with_chooser
from .options import check_addresses, check_connections, command_line, parse_arguments
from .policy import MAX_OWN
from .settings import ReplicaSettings, read_settings
from .shared_state import without_own_state

NAME = "tidewheel"
_AFTER_DRAIN_S = 5.0  # for the engine to end
_ROUTERS = {
    "prefix": "tidewheel.ray.direct.DirectRouter" if IS_DIRECT else "tidewheel.ray.router.PrefixRouter",
    "power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


def application_of(arguments: Mapping[str, Any]) -> serve.Application:
    """The application of `serve run` or a config file. Raises TidewheelError, saying what cannot be used."""
    settings, rest = read_settings(arguments)
    line, environment = command_line(rest), own_environment()
    options = parse_arguments(line, environment)
    check_addresses(options)
    if options.replicas.distributed_executor_backend == "ray" and options.engine.pipeline.stages > 1:
        raise TidewheelError(
            "the stages of a replica are processes on its node: leave distributed_executor_backend=ray out, or start "
            "one server whose stages are on several nodes by tidewheel serve --distributed-executor-backend ray"
        )
    if options.replicas.data_parallel_size > 1:
        raise TidewheelError("data_parallel_size is for tidewheel serve: give the application num_replicas instead")
    return make_application(settings, line, environment, options)


def make_application(
    settings: ReplicaSettings,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    options: ServeOptions,
    *,
    folder: str | None = None,
) -> serve.Application:
    """Replicas that are started with the arguments of `tidewheel serve`; `options` are the same, parsed.

    Relative paths begin at `folder`; None is the folder where Ray's workers run. Raises TidewheelError for options that
    cannot be used with Ray.
    """
    check_connections(options)
    if settings.is_several:
        without_own_state(options)
    deployment = serve.deployment(
        TidewheelServer,
        name=NAME,
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            **({} if settings.memory_gib is None else {"memory": int(settings.memory_gib * 2**30)}),
        },
        max_ongoing_requests=settings.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.http.shutdown_timeout + _AFTER_DRAIN_S,
        graceful_shutdown_wait_loop_s=min(2.0, options.http.shutdown_timeout or 0.1),
        health_check_period_s=settings.health_check_period_s,
        request_router_config=_router(settings, options),
        **_number(settings),
    )
    bound = settings.num_cpus if settings.bind_cores else None
    replicas = deployment.bind(list(arguments), dict(environment), bound, settings.is_several, folder)
    return with_chooser(replicas) if IS_DIRECT and settings.router == "prefix" else replicas


def _number(settings: ReplicaSettings) -> dict[str, Any]:
    if settings.max_replicas is None:
        return {"num_replicas": settings.num_replicas or 1}
    scaling = AutoscalingConfig(
        min_replicas=1 if settings.min_replicas is None else settings.min_replicas,
        max_replicas=settings.max_replicas,
        target_ongoing_requests=settings.target_ongoing_requests,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        **({"policy": _wait_policy(settings)} if settings.autoscaling == "wait" else {}),
    )
    return {"autoscaling_config": scaling}


def _wait_policy(settings: ReplicaSettings) -> AutoscalingPolicy:
    names = ("target_ongoing_requests", "target_wait_s", "target_waiting_requests")
    return AutoscalingPolicy(
        policy_function="tidewheel.ray.autoscaling.WaitPolicy",
        policy_kwargs={name: getattr(settings, name) for name in names},
    )


def _router(settings: ReplicaSettings, options: ServeOptions) -> RequestRouterConfig:
    of_prefix = {
        "most_load": settings.most_load,
        "max_own": min(MAX_OWN, options.engine.max_num_seqs),
        "loads_models": options.hosts,
    }
    return RequestRouterConfig(
        request_router_class=_ROUTERS[settings.router],
        request_router_kwargs=of_prefix if settings.router == "prefix" else {},
        request_routing_stats_period_s=settings.routing_stats_period_s,
    )
