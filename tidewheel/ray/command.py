"""`tidewheel serve --distributed-executor-backend ray`: the server as replicas on Ray Serve."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.options.serve import ServeOptions

from .cluster import connected, no_ray, own_environment

logger = logging.getLogger(__name__)

_OF_OWN_CLUSTER = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "tidewheel.ray.proxy.middlewares",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # half as many tokens again as by calls of actors
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(options: ServeOptions, arguments: Sequence[str]) -> int:
    """Start the replicas and wait for a signal, on which they drain. Raises TidewheelError if they cannot be started.

    Without RAY_ADDRESS, Ray is started on this machine and ends with this process.
    """
    with connected(_OF_OWN_CLUSTER) as is_own:
        try:
            import ray
            from ray import serve
        except ImportError as error:
            raise no_ray(error) from None
        from .application import NAME, make_application
        from .settings import ReplicaSettings

        folder = os.getcwd()
        count = options.replicas.data_parallel_size
        cpus = options.replicas.cpus_per_replica or max(1, int(ray.cluster_resources().get("CPU", 1)) // count)
        settings = ReplicaSettings(num_replicas=count, num_cpus=cpus)
        application = make_application(
            settings, arguments, own_environment(), options, folder=folder if is_own else None
        )
        with _Ending() as ending:
            serve.start(http_options=_http_options(options))
            try:
                serve.run(application, name=NAME, route_prefix="/")
            except RuntimeError as error:
                raise TidewheelError(f"the replicas cannot be started: {_reason(serve) or error}") from error
            http = options.http
            address = f"{'https' if http.ssl_certfile else 'http'}://{http.host}:{http.port}"
            logger.info("Serving on %s by %d replicas of %d cores", address, count, cpus)
            ending.wait()
        logger.info("Draining the replicas")
        if is_own:
            serve.shutdown()
        else:
            serve.delete(NAME)
    return 0


def _http_options(options: ServeOptions) -> Mapping[str, Any]:
    http = options.http
    if http.port == 0:
        raise TidewheelError("--port 0 cannot be used with Ray Serve: name a port")
    return {
        "host": http.host,
        "port": http.port,
        "keep_alive_timeout_s": http.keep_alive_timeout_s,
        "ssl_certfile": http.ssl_certfile,
        "ssl_keyfile": http.ssl_keyfile or http.ssl_certfile,
    }


class _Ending:
    """Waits for SIGINT or SIGTERM, wherever the program is."""

    def __enter__(self) -> _Ending:
        self._event = threading.Event()
        self._before = {number: signal.signal(number, lambda *_: self._event.set()) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> None:
        """Until a signal comes."""
        self._event.wait()


def _reason(serve: Any) -> str:
    """What Serve says of the application's replicas, of which the last lines are the error."""
    messages = [
        deployment.message for app in serve.status().applications.values() for deployment in app.deployments.values()
    ]
    return "; ".join(message.strip().splitlines()[-1] for message in messages if message.strip())
