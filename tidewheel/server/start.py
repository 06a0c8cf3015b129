"""`tidewheel serve`: listen, load the model and import the server meanwhile, serve.

Only what finding and loading a model needs is imported here: the rest takes as long as the weights of a small model.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.launch import EngineLoad, EngineOptions
from tidewheel.server.app_options import read_app_options
from tidewheel.server.options import ModelOptions, ServerOptions, parse_options

if TYPE_CHECKING:
    from tidewheel.engine.encoders.engine import EncoderEngine

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).with_name("demo")
DEMO_MODEL_NAME = "tidewheel-demo"


def run(arguments: Sequence[str]) -> int:
    """The `serve` command. Raises TidewheelError if the model cannot be served or the port is taken."""
    model_options, options = parse_options(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    names = options.served_model_name or ((DEMO_MODEL_NAME,) if model_options.model is None else ())
    app_options = read_app_options(options, names)
    engine = engine_options(model_options)
    # Before the model is loaded, so that a taken port is known at once; nobody is let in until there is a model.
    with _bind(options.host, options.port) as listener:
        with _without_collections():
            # Before the chat model, which takes its KV cache's share of the memory that is left.
            encoders = _load_encoders(model_options, options) if options.embedding_model else None
            with EngineLoad(engine) as load:
                from tidewheel.server.serve import build_server

                server = build_server(load, encoders, app_options, options)
        served = [*(names or [engine.model]), *(encoders.encoders if encoders else ())]
        logger.info("Serving %s on %s", ", ".join(served), _printable_address(listener))
        server.run([listener])
    return 0


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    # Nearly all that a start makes stays: no collection need walk it now, nor later while streams wait.
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def engine_options(options: ModelOptions) -> EngineOptions:
    """The command line's options as the engine's; without a model they mean the embedded one."""
    values = {name: value for name, value in asdict(options).items() if value is not None}
    values.setdefault("model", str(DEMO_MODEL))
    return EngineOptions(**values)


def _load_encoders(model_options: ModelOptions, options: ServerOptions) -> EncoderEngine:
    from tidewheel.engine.encoders.launch import load_encoders

    return load_encoders(
        options.embedding_model,
        options.served_embedding_model_name,
        threads=options.embedding_threads,
        download_dir=model_options.download_dir,
    )


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
