"""`tidewheel serve`: load the model, listen, and on SIGTERM let running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.engine import Engine
from tidewheel.engine.errors import ModelError, TidewheelError
from tidewheel.engine.launch import EngineOptions, load_engine
from tidewheel.server.admission import AdmissionLimits
from tidewheel.server.app import AppOptions, build_app
from tidewheel.server.auth import read_key_file
from tidewheel.server.chat.templates import read_template_option
from tidewheel.server.connections import ConnectionLimits, connection_class
from tidewheel.server.listener import open_listener, printable_address, tls_context
from tidewheel.server.logs import configure_logging
from tidewheel.server.middleware import import_middleware
from tidewheel.server.options import ModelOptions, ServerOptions, parse_options, public_options
from tidewheel.server.tracing import Tracer

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).with_name("demo")
DEMO_MODEL_NAME = "tidewheel-demo"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_FRAMES_S = 5.0  # after the time-out, for aborted answers to say so to their clients
_BACKLOG = 2048
_MAX_OPEN_FILES = 65536
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would send into closed ones
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def run(arguments: Sequence[str]) -> int:
    """The `serve` command. Raises TidewheelError if the model cannot be served or the port is taken, or later fails."""
    model_options, options = parse_options(arguments)
    configure_logging(options.log_level, options.log_format)
    _allow_many_connections()
    names = options.served_model_name or ((DEMO_MODEL_NAME,) if model_options.model is None else ())
    app_options = _app_options(options, names, public_options(model_options, options))
    tls = None
    if options.ssl_certfile is not None:
        tls = tls_context(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs, options.ssl_cert_reqs)
    # Before the model is loaded, so that a taken port is known at once; nobody is let in until there is a model.
    with open_listener(options.host, options.port, options.uds) as listener:
        # Before the chat model, which takes its KV cache's share of the memory that is left.
        encoder_engine = _load_encoders(model_options, options)
        engine = load_engine(engine_options(model_options))
        app = build_app(engine, app_options, encoder_engine)
        gc.collect()
        gc.freeze()  # what was made until now stays: no collection need walk it while streams wait
        address = printable_address(listener, tls=tls is not None)
        served = [*(names or [engine.model_name]), *encoder_engine.encoders]
        logger.info("Serving %s on %s", ", ".join(served), address)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=connection_class(_connection_limits(options)),
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,  # the application's own names the request
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        config.load()
        config.ssl = tls
        server = Server(config, engine, encoder_engine, options.shutdown_timeout)
        server.run([listener])
    if engine.is_alive:
        # Left behind in a step, or by a second Ctrl-C: it would take part in the interpreter's end.
        logging.shutdown()
        os._exit(130 if server.force_exit else int(engine.stats().stalled_steps_total > 0))
    if (failure := server.failure) is not None:
        raise TidewheelError(f"the engine has failed: {failure}")
    return 0


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM drains the engines while uvicorn waits for the connections.

    It ends by itself when one of them has failed, once the clients have been told.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, encoder_engine: EncoderEngine, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._engines = (engine, encoder_engine)
        self._shutdown_timeout_s = shutdown_timeout_s
        config.timeout_graceful_shutdown = int(shutdown_timeout_s + _ERROR_FRAMES_S)

    @property
    def failure(self) -> BaseException | None:
        """What has killed an engine."""
        return next((engine.failure for engine in self._engines if engine.failure is not None), None)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.failure is not None:
            self.config.timeout_graceful_shutdown = int(_ERROR_FRAMES_S)
        drains = [asyncio.create_task(engine.drain(self._shutdown_timeout_s)) for engine in self._engines]
        await super().shutdown(sockets)
        for drain in drains:
            drain.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn's own raises the signal again in the end; here a drained server has ended well, with exit code 0.
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def engine_options(options: ModelOptions) -> EngineOptions:
    """The command line's options as the engine's; without a model they mean the embedded one."""
    model = str(DEMO_MODEL) if options.model is None else options.model
    return EngineOptions(**{**asdict(options), "model": model})


def _load_encoders(model_options: ModelOptions, options: ServerOptions) -> EncoderEngine:
    if not options.embedding_model:
        return EncoderEngine()
    from tidewheel.engine.encoders.launch import load_encoders

    return load_encoders(
        options.embedding_model,
        options.served_embedding_model_name,
        threads=options.embedding_threads,
        download_dir=model_options.download_dir,
    )


def _app_options(options: ServerOptions, names: Sequence[str], shown_options: Mapping[str, Any]) -> AppOptions:
    return AppOptions(
        served_model_names=names,
        api_keys=options.api_key + (() if options.api_key_file is None else read_key_file(options.api_key_file)),
        protect_health=options.protect_health,
        protect_metrics=options.protect_metrics,
        allowed_origins=options.allowed_origins,
        allow_credentials=options.allow_credentials,
        allowed_methods=options.allowed_methods,
        allowed_headers=options.allowed_headers,
        root_path=options.root_path or "",
        middleware=[import_middleware(path) for path in options.middleware],
        request_id_headers=options.enable_request_id_headers,
        chat_template=None if options.chat_template is None else read_template_option(options.chat_template),
        sampling_defaults=_sampling_defaults(options.generation_config),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        trust_request_chat_template=options.trust_request_chat_template,
        max_body_bytes=options.max_body_size,
        admission=AdmissionLimits(
            max_queue=options.max_queue,
            max_prompts=options.max_prompts,
            max_n=options.max_n,
            request_timeout_s=options.request_timeout,
        ),
        tracer=None if options.otlp_traces_endpoint is None else Tracer(options.otlp_traces_endpoint),
        metrics_prefix=options.metrics_prefix,
        shown_options=shown_options,
        log_requests=not options.disable_log_requests,
        log_access=not options.disable_access_log,
    )


def _connection_limits(options: ServerOptions) -> ConnectionLimits:
    return ConnectionLimits(
        max_header_bytes=options.max_header_size,
        max_header_count=options.max_header_count,
        read_timeout_s=options.read_timeout,
        write_timeout_s=options.write_timeout,
    )


def _allow_many_connections() -> None:
    """Raise the limit on open files, often 1,024, as far as this process may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _sampling_defaults(generation_config: str) -> Mapping[str, float | int] | None:
    """What `--generation-config` says; None is the model's own defaults."""
    if generation_config == "auto":
        return None
    if generation_config == "vllm":
        return {}
    path = Path(generation_config) / "generation_config.json"
    try:
        config = orjson.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"--generation-config {generation_config}: {path.name} cannot be read: {error}") from error
    return {name: config[name] for name in _SAMPLING_DEFAULTS if isinstance(config.get(name), int | float)}
