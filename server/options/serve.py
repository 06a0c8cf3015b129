"""Every option of `tidewheel serve`, put together from those who use them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.engine.declaring.option import OptionError, options_of
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.options import EngineOptions

from ..app_options import AppOptions
from ..http.limits import AdmissionLimits, ConnectionLimits
from ..http.options import HttpOptions
from ..telemetry.logs import LogOptions
from .config_file import ConfigFileOptions, read_config_file
from .model import DEMO_MODEL_NAME, MODEL_OPTIONS, engine_options, model_parser, read_model_options
from .parser import OptionParser, add_option, build, in_order_of_help, read_given, shown_options
from .replicas import ReplicaOptions
from .variables import as_arguments, idle_variables, unknown_variables
from .vllm_flags import read_vllm_line, vllm_flags

_OWNERS = (
    ConfigFileOptions,
    HttpOptions,
    ConnectionLimits,
    AppOptions,
    AdmissionLimits,
    EncoderOptions,
    LogOptions,
    ReplicaOptions,
)
_RUNS = (
    "config host root_path ssl_certfile middleware embedding_model generation_config max_queue unknown_parameters "
    "max_answer_size max_header_size request_timeout read_timeout shutdown_timeout metrics_prefix log_level "
    "disable_log_requests distributed_executor_backend"
).split()

_SERVER_OPTIONS = in_order_of_help(_OWNERS, _RUNS)
SERVE_OPTIONS = [*MODEL_OPTIONS, *_SERVER_OPTIONS]
"""All of them, in the order of --help."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `tidewheel serve` was told, by who needs to know it.

    `shown` is all of it but the secrets, by name. `notes` are for the log: what was given and has no effect.
    """

    engine: EngineOptions
    encoders: EncoderOptions
    app: AppOptions
    http: HttpOptions
    log: LogOptions
    replicas: ReplicaOptions
    shown: Mapping[str, Any]
    notes: Sequence[str] = field(default=(), compare=False)


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, *, prog: str = "tidewheel serve"
) -> ServeOptions:
    """The options of a command line, the file that it names and an environment, which go in this order.

    Prints what is wrong and exits with 2 if they are unusable.
    """
    parser = model_parser(prog, "Serve a model over an OpenAI-compatible API.")
    group = parser.add_argument_group("server")
    for option in _SERVER_OPTIONS:
        add_option(group, option)
    try:
        parsed, notes = _read(parser, arguments, environment)
        given = read_model_options(parser, parsed, environment)
        given |= read_given(_SERVER_OPTIONS, parsed, environment)
        names = given.get("served_model_name") or (() if "model" in given else (DEMO_MODEL_NAME,))
        engine, replicas = engine_options(given), build(ReplicaOptions, given)
        if engine.pipeline.stages > 1 and replicas.data_parallel_size > 1:
            raise OptionError(
                "--pipeline-parallel-size and --data-parallel-size do not work together: start several servers with "
                "stages, and let a proxy share requests among them (docs/scale-out.md)"
            )
        return ServeOptions(
            engine=engine,
            encoders=build(EncoderOptions, given),
            app=build(AppOptions, {**given, "served_model_name": names}, admission=build(AdmissionLimits, given)),
            http=build(HttpOptions, given, limits=build(ConnectionLimits, given)),
            log=build(LogOptions, given),
            replicas=replicas,
            shown=shown_options(SERVE_OPTIONS, given),
            notes=notes,
        )
    except OptionError as error:
        parser.error(str(error))


def _read(
    parser: OptionParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """What the command line gives by name, then the file, and what to log. Raises OptionError."""
    line = read_vllm_line(arguments, parser.flags)
    parsed = parser.parse_known(line.ours, line.refusals)
    path = read_given(options_of(ConfigFileOptions), parsed, environment).get("config")
    of_file = read_vllm_line(read_config_file(path) if path else (), parser.flags)
    parser.where = f"{path}: "
    in_file = parser.parse_known(of_file.ours, of_file.refusals)
    parser.where = ""
    in_environment = read_vllm_line(as_arguments(SERVE_OPTIONS, environment, vllm_flags()), parser.flags)
    if wrong := [*unknown_variables(SERVE_OPTIONS, environment, vllm_flags()), *in_environment.refusals]:
        raise OptionError(". ".join(wrong))
    notes = [*line.notes, *of_file.notes, *in_environment.notes, *idle_variables(SERVE_OPTIONS, environment)]
    if parsed.get("positional_model") is None:
        return {**in_file, **parsed, "positional_model": in_file.get("positional_model")}, notes
    in_file.pop("model", None)
    return {**in_file, **parsed}, notes
