"""What serves: the application in uvicorn, which on SIGTERM lets running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import orjson
import uvicorn

from tidewheel.engine.engine import Engine
from tidewheel.engine.errors import ModelError
from tidewheel.engine.launch import EngineLoad
from tidewheel.server.app import AppOptions, build_app
from tidewheel.server.chat.templates import read_template_option
from tidewheel.server.options import ServerOptions

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_FRAMES_S = 5.0  # after the time-out, for aborted answers to say so to their clients
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would send into closed ones
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def build_server(load: EngineLoad, options: ServerOptions, names: Sequence[str]) -> Server:
    """The server of a model, when it is loaded. Raises TidewheelError if it cannot be served as the options say."""
    app_options = _app_options(options, names)
    engine = load.engine()
    config = uvicorn.Config(
        build_app(engine, app_options),
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
    return Server(config, engine, options.shutdown_timeout)


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM drains the engine while uvicorn waits for the connections."""

    def __init__(self, config: uvicorn.Config, engine: Engine, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout_s = shutdown_timeout_s
        config.timeout_graceful_shutdown = int(shutdown_timeout_s + _ERROR_FRAMES_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._engine.drain(self._shutdown_timeout_s))
        await super().shutdown(sockets)
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
