"""`tidewheel serve`: listen, load the model and import the server meanwhile, serve.

Only what finding and loading a model needs is imported here: the rest takes as long as the weights of a small model.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.engine.load import EngineLoad, EngineOptions

from ..http.listener import allow_many_connections, open_listener, printable_address
from ..options.app import read_app_options
from ..options.serve import ModelOptions, ServerOptions, parse_options, public_options
from ..telemetry.logs import configure_logging

if TYPE_CHECKING:
    import ssl

    from tidewheel.engine.encoders.engine import EncoderEngine

logger = logging.getLogger(__name__)

DEMO_MODEL = Path(__file__).parents[1] / "demo"
DEMO_MODEL_NAME = "tidewheel-demo"
DEMO_QUANTIZATION = "int8-channel"  # as many of its held-out prompts are answered right as in bfloat16, sooner


def run(arguments: Sequence[str]) -> int:
    """The `serve` command. Raises TidewheelError if the model cannot be served or the port is taken, or later fails."""
    model_options, options = parse_options(arguments)
    configure_logging(options.log_level, options.log_format)
    allow_many_connections()
    if options.enable_auto_tool_choice:
        logger.info("--enable-auto-tool-choice has no effect: calls are returned as tool_calls without it")
    names = options.served_model_name or ((DEMO_MODEL_NAME,) if model_options.model is None else ())
    app_options = read_app_options(options, names, public_options(model_options, options))
    tls = _tls(options)
    engine = engine_options(model_options)
    # Before the model is loaded, so that a taken port is known at once; nobody is let in until there is a model.
    with open_listener(options.host, options.port, options.uds) as listener:
        with _without_collections():
            # Before the chat model, which takes its KV cache's share of the memory that is left.
            encoders = _load_encoders(model_options, options) if options.embedding_model else None
            with EngineLoad(engine) as load:
                from ..service import build_server

                server = build_server(load, encoders, app_options, options, tls)
        served = [*(names or [engine.model]), *(encoders.encoders if encoders else ())]
        logger.info("Serving %s on %s", ", ".join(served), printable_address(listener, tls=tls is not None))
        server.run([listener])
    return server.end()


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
    """The command line's options as the engine's.

    Without a model they mean the embedded one, on the CPU with DEMO_QUANTIZATION where they leave open how its weights
    are stored.
    """
    if options.model is not None:
        return EngineOptions(**asdict(options))
    quantization = options.quantization
    if quantization is None and options.dtype == "auto" and options.device != "torch":
        quantization = DEMO_QUANTIZATION
    return EngineOptions(**{**asdict(options), "model": str(DEMO_MODEL), "quantization": quantization})


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    if options.ssl_certfile is None:
        return None
    from ..http.tls import tls_context

    return tls_context(options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs, options.ssl_cert_reqs)


def _load_encoders(model_options: ModelOptions, options: ServerOptions) -> EncoderEngine:
    from tidewheel.engine.encoders.load import load_encoders

    return load_encoders(
        options.embedding_model,
        options.served_embedding_model_name,
        threads=options.embedding_threads,
        download_dir=model_options.download_dir,
    )
