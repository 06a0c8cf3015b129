"""`tidewheel serve`: listen, load the model and import the server meanwhile, serve.

Only what finding and loading a model needs is imported here: the rest takes as long as the weights of a small model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tidewheel.engine.encoders.settings import pools
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.downloads import downloads_of
from tidewheel.engine.loading.load import EngineLoad, check_at_once
from tidewheel.engine.machine.memory import read_memory, release_free_memory, share_heaps
from tidewheel.engine.model_names import short_name
from tidewheel.engine.start_log import start_logger
from tidewheel.engine.weights.hub import local_model

from ..app_resources import find_resources
from ..garbage import without_collections
from ..http.listener import allow_many_connections, open_listener, printable_address
from ..options.serve import ServeOptions, parse_options
from ..telemetry.logs import configure_logging, on_terminal

if TYPE_CHECKING:
    import ssl

    from tidewheel.engine.core.engine import Engine
    from tidewheel.engine.encoders.engine import EncoderEngine
    from tidewheel.engine.pipeline.stages import StageHost

    from ..app_resources import AppResources
    from ..http.options import HttpOptions
    from ..http.server import Server

logger = logging.getLogger(__name__)


# That a thread may keep Python's lock while another one waits. A thread that reads something long for one client holds
# up the event loop and the engine for so long again and again; by default it is five times as much.
_TURN_S = 1e-3


def run(arguments: Sequence[str]) -> int:
    """The `serve` command. Raises TidewheelError if the model cannot be served or the port is taken, or later fails."""
    from tidewheel.ray.taking import with_ray

    options = parse_options(arguments)
    replicas, why_ray = with_ray(options.replicas, options.engine)
    options = replace(options, replicas=replicas)
    on_ray = options.replicas.distributed_executor_backend == "ray"
    stages_on_ray = on_ray and options.engine.pipeline.stages > 1
    shows_banner = on_terminal() and options.log.log_format == "text" and (not on_ray or stages_on_ray)
    # The banner says the same, but a log level that was asked for shows all of it.
    quiet_start = shows_banner and not options.log.given_flags(["log_level"])
    configure_logging(options.log.log_level, options.log.log_format, quiet_start=quiet_start)
    allow_many_connections()
    sys.setswitchinterval(_TURN_S)
    share_heaps()
    for note in (*options.notes, *options.app.without_effect(), *filter(None, [why_ray])):
        logger.info("%s", note)
    if options.hosts and not on_ray:
        return _serve_several(options, shows_banner=shows_banner)
    if on_ray and not options.hosts and pools(options.engine, options.encoders):
        raise ModelError(
            f"{options.engine.model} is an encoder, and replicas and stages on Ray are for models that generate: start "
            "one server for each replica, without --distributed-executor-backend ray and --data-parallel-size"
        )
    if stages_on_ray:
        from tidewheel.ray.pipeline import stage_host

        with stage_host(options.engine, options.replicas) as host:
            return _serve(options, host, shows_banner=shows_banner)
    if on_ray:
        from tidewheel.ray.command import run as run_replicas

        return run_replicas(options, arguments)
    return _serve(options, None, shows_banner=shows_banner)


def _serve(options: ServeOptions, host: StageHost | None, *, shows_banner: bool) -> int:
    """Serve from this process until it is asked to end. Stages run where `host` has them."""
    resources = find_resources(options.app)
    tls = _tls(options.http)
    # Before the model is loaded, so that a taken port is known at once. No request is accepted until there is a model.
    with open_listener(options.http.host, options.http.port, options.http.uds) as listener:
        server, engine, encoders = _load_server(options, host, resources, tls)
        release_free_memory()  # what loading took
        others = list(encoders.encoders.values()) if encoders else []
        # The model that the command is for.
        info, length = (others[0].info, others[0].max_length) if engine is None else (engine.info, engine.max_model_len)
        own = options.app.served_model_names or [short_name(options.engine.model)]
        served = [*own, *(one.name for one in (others[1:] if engine is None else others))]
        address = printable_address(listener, tls=tls is not None)
        start_logger.info("Serving %s on %s", ", ".join(served), address)
        if shows_banner:
            from ..telemetry.banner import banner

            print(banner(served, info, length, address, page=options.app.web_ui), file=sys.stderr)
        server.run([listener])
    return server.end()


def _serve_several(options: ServeOptions, *, shows_banner: bool) -> int:
    """Serve models that are loaded when requests name them, from this process until it is asked to end."""
    resources = find_resources(options.app)
    tls = _tls(options.http)
    with open_listener(options.http.host, options.http.port, options.http.uds) as listener:
        with without_collections():
            from ..hosting.catalog import Catalog
            from ..hosting.service import build_host_server
            from ..telemetry.banner import few, hosting_banner

            catalog = Catalog(options)
            server = build_host_server(options, catalog, resources, tls)
        address = printable_address(listener, tls=tls is not None)
        names = [entry.name for entry in catalog.entries if entry.error is None]
        if broken := [f"{entry.name} ({entry.error})" for entry in catalog.entries if entry.error is not None]:
            logger.warning("Not served, because they are broken: %s", few(broken))
        start_logger.info("Serving %s on %s", few(names) or "no models yet", address)
        if shows_banner:
            memory_bytes = options.hosting.memory_bytes(read_memory().available or 0)
            print(hosting_banner(names, memory_bytes, address, page=options.app.web_ui), file=sys.stderr)
        server.run([listener])
    return server.end()


def _load_server(
    options: ServeOptions,
    host: StageHost | None,
    resources: AppResources,
    tls: Callable[[], ssl.SSLContext] | None,
) -> tuple[Server, Engine | None, EncoderEngine | None]:
    """The server, and the chat model and the embedding models in it.

    What loading took, such as a mapped file, is freed with its frame.
    """
    if local_model(options.engine.model, ".gguf") is None:  # before the hub is asked what the model is for
        check_at_once(options.engine, host)
    if pools(options.engine, options.encoders):
        server, alone = _load_encoder_server(options, resources, tls)
        return server, None, alone
    check_at_once(options.engine, host)
    with without_collections():
        # Before the chat model, which takes its KV cache's share of the memory that is left.
        encoders = load_encoders_of(options)
        with EngineLoad(options.engine) if host is None else EngineLoad(options.engine, host) as load:
            from ..service import build_server

            return *build_server(load, encoders, options, resources, tls), encoders


def _load_encoder_server(
    options: ServeOptions, resources: AppResources, tls: Callable[[], ssl.SSLContext] | None
) -> tuple[Server, EncoderEngine]:
    """The server of a model that is an encoder. No chat model is loaded."""
    from tidewheel.engine.encoders.load import load_model_alone

    with without_collections(), ThreadPoolExecutor(1, "weights") as loader:
        # The server is imported meanwhile.
        loaded = loader.submit(load_model_alone, options.engine, options.encoders, options.app.served_model_names)
        from ..encoder_service import build_encoder_server

        return build_encoder_server(loaded.result, options, resources, tls)


def _tls(options: HttpOptions) -> Callable[[], ssl.SSLContext] | None:
    """What gives the TLS context of each new connection."""
    if options.ssl_certfile is None:
        return None
    from ..http.tls import RefreshedTls, tls_context

    files = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    make = partial(tls_context, *files, options.ssl_cert_reqs)
    if options.enable_ssl_refresh:
        return RefreshedTls(make, [file for file in files if file is not None])
    context = make()
    return lambda: context


def load_encoders_of(options: ServeOptions) -> EncoderEngine | None:
    """The engine of the embedding and reranking models, if there are any. Raises TidewheelError."""
    if not options.encoders.models:
        return None
    from tidewheel.engine.encoders.load import load_encoders_beside

    return load_encoders_beside(options.engine, options.encoders, downloads_of(options.engine))
