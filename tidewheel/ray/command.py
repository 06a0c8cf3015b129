"""`tidewheel serve --distributed-executor-backend ray`: the server as replicas on Ray Serve."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.engine.declaring.option import listed
from tidewheel.engine.errors import TidewheelError
from tidewheel.server.http.options import HttpOptions
from tidewheel.server.options.serve import ServeOptions

from .cluster import connected, no_ray, own_environment
from .prefixes import LONGEST_BODY
from .room import check_room, cluster_cpus, cpus_of_replicas

logger = logging.getLogger(__name__)

_OF_OWN_CLUSTER = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "tidewheel.ray.proxy.middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # half as many tokens again as by calls of actors
    # Else Serve takes a proxy that needs more than 5 s to start, on a busy machine, for one that cannot, and kills it.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Where HAProxy takes the place of Serve's proxies, it asks with the body of a request where that goes.
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(LONGEST_BODY),
    # It hears at once of a replica that ends, and not by asking it as a load balancer of others would.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.2  # between two looks at whether all replicas run
_LOG_EVERY_S = 30.0  # between two words on what they wait for


def run(options: ServeOptions, arguments: Sequence[str]) -> int:
    """Start the replicas, and drain them on a signal. Raises TidewheelError if they cannot be started.

    Without RAY_ADDRESS, Ray is started on this machine and ends with this process.
    """
    _check_address(options.http)
    with connected(_OF_OWN_CLUSTER) as is_own:
        try:
            from ray import serve
        except ImportError as error:
            raise no_ray(error) from None
        from .application import NAME, make_application
        from .settings import ReplicaSettings

        folder = os.getcwd()
        count, nodes = options.replicas.data_parallel_size, cluster_cpus()
        cpus = options.replicas.cpus_per_replica or cpus_of_replicas(count, nodes)
        if is_own:  # other clusters may grow
            check_room("replicas", count, cpus, nodes, "--data-parallel-size")
        settings = ReplicaSettings(num_replicas=count, num_cpus=cpus)
        application = make_application(
            settings, arguments, own_environment(), options, folder=folder if is_own else None
        )
        with _Ending() as ending:
            address = _start_serve(serve, options.http)
            if NAME in serve.status().applications:
                raise TidewheelError(
                    f"the cluster has an application {NAME} already, which this one would take the place of: end it "
                    f"with `serve delete {NAME}`"
                )
            try:
                if _start_replicas(serve, application, NAME, ending):
                    logger.info("Serving on %s by %d replicas of %d cores", address, count, cpus)
                    ending.wait()
                    logger.info("Draining the replicas")
            finally:
                if is_own:
                    serve.shutdown()
                else:
                    serve.delete(NAME)
    return 0


def _check_address(http: HttpOptions) -> None:
    """Raise TidewheelError for what Serve's proxies cannot do, before Ray is started, which takes long."""
    if http.port == 0:
        raise TidewheelError("--port 0 cannot be used with Ray Serve: name a port")
    # Serve's own constant would do, but Serve reads its variables when it is imported, and some are not yet set.
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and http.ssl_certfile is not None:
        raise TidewheelError(
            "--ssl-certfile cannot be used with RAY_SERVE_ENABLE_HA_PROXY=1: Serve starts HAProxy without TLS; leave "
            "that variable out, or put a server that speaks TLS before it"
        )


def _start_serve(serve: Any, http: HttpOptions) -> str:
    """Start Serve's proxies, unless the cluster has them; returns their address. Raises TidewheelError."""
    from ray.exceptions import RayError
    from ray.serve.context import _get_global_client

    wanted: Mapping[str, Any] = {
        "host": http.host,
        "port": http.port,
        "keep_alive_timeout_s": http.keep_alive_timeout_s,
        "ssl_certfile": http.ssl_certfile,
        "ssl_keyfile": http.ssl_keyfile or http.ssl_certfile,
    }
    try:
        serve.start(http_options=wanted)
    except (RayError, RuntimeError, TimeoutError) as error:
        reason = _last_line(error)
        if not _can_listen(http.host, http.port):
            raise TidewheelError(
                f"Serve's proxies cannot listen on {http.host}:{http.port}: {reason}; name another --host or --port"
            ) from error
        raise TidewheelError(
            f"Serve's proxies did not start: {reason}; try again if the machine was too busy, and name another --port "
            f"if another node of the cluster uses {http.port}"
        ) from error
    found = _get_global_client().http_config
    if flags := http.given_flags([name for name, value in wanted.items() if getattr(found, name) != value]):
        raise TidewheelError(
            f"{listed(flags)} cannot be used: Serve runs in this cluster already, on {found.host}:{found.port}, and "
            "its proxies stay as they are; leave the options out, or end Serve with `serve shutdown`"
        )
    return f"{'https' if found.ssl_certfile else 'http'}://{found.host}:{found.port}"


def _can_listen(host: str, port: int) -> bool:
    """Whether an address of this machine is free."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


def _start_replicas(serve: Any, application: Any, name: str, ending: _Ending) -> bool:
    """Start the replicas and wait until all of them run; whether they do, or the process was told to end meanwhile.

    Raises TidewheelError.
    """
    from ray.exceptions import RayError
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException
    from ray.serve.schema import ApplicationStatus

    try:
        # Serve itself would wait for ever, deaf to signals.
        target = serve.RunTarget(application, name=name, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        logged_at = time.monotonic()
        while not ending.wait(_LOOK_S):
            status = serve.status().applications[name].status
            if status == ApplicationStatus.RUNNING:
                _get_global_client().wait_for_proxies_serving()
                return True
            if status == ApplicationStatus.DEPLOY_FAILED:
                raise TidewheelError(f"the replicas cannot be started: {_reason(serve, name)}")
            if time.monotonic() - logged_at >= _LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.warning("Not all replicas run yet: %s", _reason(serve, name) or "they load the model")
    except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
        raise TidewheelError(f"the replicas cannot be started: {_last_line(error)}") from error
    return False


class _Ending:
    """Waits for SIGINT or SIGTERM, wherever the program is."""

    def __enter__(self) -> _Ending:
        self._event = threading.Event()
        self._before = {number: signal.signal(number, lambda *_: self._event.set()) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until a signal comes; whether one has."""
        return self._event.wait(timeout_s)


def _reason(serve: Any, name: str) -> str:
    """Serve's message about the application and its replicas. Its last lines are the error."""
    application = serve.status().applications[name]
    messages = [deployment.message for deployment in application.deployments.values()] or [application.message]
    return "; ".join(_last_line(message) for message in messages if message.strip())


def _last_line(said: object) -> str:
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    return lines[-1] if lines else type(said).__name__
