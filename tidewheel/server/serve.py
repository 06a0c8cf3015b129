"""`tidewheel serve`: load the model, listen, and on SIGTERM let running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
import uvicorn

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.engine import Engine
from tidewheel.engine.errors import ModelError, TidewheelError
from tidewheel.engine.launch import EngineOptions, load_engine
from tidewheel.server.app import AppOptions, build_app
from tidewheel.server.chat.templates import read_template_option
from tidewheel.server.options import ModelOptions, ServerOptions, parse_options

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).with_name("demo")
DEMO_MODEL_NAME = "tidewheel-demo"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_FRAMES_S = 5.0  # after the time-out, for aborted answers to say so to their clients
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would send into closed ones
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def run(arguments: Sequence[str]) -> int:
    """The `serve` command. Raises TidewheelError if the model cannot be served or the port is taken."""
    model_options, options = parse_options(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    names = options.served_model_name or ((DEMO_MODEL_NAME,) if model_options.model is None else ())
    app_options = _app_options(options, names)
    # Before the model is loaded, so that a taken port is known at once; nobody is let in until there is a model.
    with _bind(options.host, options.port) as listener:
        # Before the chat model, which takes its KV cache's share of the memory that is left.
        encoder_engine = _load_encoders(model_options, options)
        engine = load_engine(engine_options(model_options))
        app = build_app(engine, app_options, encoder_engine)
        gc.collect()
        gc.freeze()  # what was made until now stays: no collection need walk it while streams wait
        address = _printable_address(listener)
        served = [*(names or [engine.model_name]), *encoder_engine.encoders]
        logger.info("Serving %s on %s", ", ".join(served), address)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=not options.disable_access_log,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            server_header=False,
        )
        Server(config, engine, encoder_engine, options.shutdown_timeout).run([listener])
    return 0


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM drains the engines while uvicorn waits for the connections."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, encoder_engine: EncoderEngine, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._encoder_engine = encoder_engine
        self._shutdown_timeout_s = shutdown_timeout_s
        config.timeout_graceful_shutdown = int(shutdown_timeout_s + _ERROR_FRAMES_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engines = (self._engine, self._encoder_engine)
        drains = [asyncio.create_task(engine.drain(self._shutdown_timeout_s)) for engine in engines]
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
    values = {name: value for name, value in asdict(options).items() if value is not None}
    values.setdefault("model", str(DEMO_MODEL))
    return EngineOptions(**values)


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


def _app_options(options: ServerOptions, names: Sequence[str]) -> AppOptions:
    return AppOptions(
        served_model_names=names,
        api_keys=options.api_key,
        chat_template=None if options.chat_template is None else read_template_option(options.chat_template),
        sampling_defaults=_sampling_defaults(options.generation_config),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        trust_request_chat_template=options.trust_request_chat_template,
        max_stored_responses=options.max_stored_responses,
        max_body_bytes=options.max_body_size,
        log_requests=not options.disable_log_requests,
    )


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


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TidewheelError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _printable_address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
