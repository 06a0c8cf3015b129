"""Every option of `tidewheel serve`, put together from those who use them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.options import EngineOptions

from ..app_options import AppOptions
from ..http.limits import AdmissionLimits, ConnectionLimits
from ..http.options import HttpOptions
from ..telemetry.logs import LogOptions
from .model import DEMO_MODEL_NAME, MODEL_OPTIONS, engine_options, model_parser, read_model_options
from .parser import add_option, build, in_order_of_help, read_given, shown_options

_OWNERS = (HttpOptions, ConnectionLimits, AppOptions, AdmissionLimits, EncoderOptions, LogOptions)
_RUNS = (
    "host root_path ssl_certfile middleware embedding_model generation_config max_queue unknown_parameters "
    "max_answer_size max_header_size request_timeout read_timeout shutdown_timeout metrics_prefix log_level "
    "disable_log_requests"
).split()


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `tidewheel serve` was told, by who needs to know it. `shown` is all of it but the secrets, by name."""

    engine: EngineOptions
    encoders: EncoderOptions
    app: AppOptions
    http: HttpOptions
    log: LogOptions
    shown: Mapping[str, Any]


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, *, prog: str = "tidewheel serve"
) -> ServeOptions:
    """The options of a command line and an environment. Prints what is wrong and exits with 2 if they are unusable."""
    parser = model_parser(prog, "Serve a model over an OpenAI-compatible API.")
    group = parser.add_argument_group("server")
    server_options = in_order_of_help(_OWNERS, _RUNS)
    for option in server_options:
        add_option(group, option)
    parsed = parser.parse_known(arguments)
    given = read_model_options(parser, parsed, environment)
    try:
        given |= read_given(server_options, parsed, environment)
        names = given.get("served_model_name") or (() if "model" in given else (DEMO_MODEL_NAME,))
        return ServeOptions(
            engine=engine_options(given),
            encoders=build(EncoderOptions, given),
            app=build(AppOptions, {**given, "served_model_name": names}, admission=build(AdmissionLimits, given)),
            http=build(HttpOptions, given, limits=build(ConnectionLimits, given)),
            log=build(LogOptions, given),
            shown=shown_options([*MODEL_OPTIONS, *server_options], given),
        )
    except OptionError as error:
        parser.error(str(error))
