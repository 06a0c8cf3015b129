"""Every option of `tidewheel serve`, put together from those who use them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import options_of
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
    "config host root_path ssl_certfile middleware runner generation_config max_queue unknown_parameters "
    "max_answer_size max_header_size request_timeout read_timeout shutdown_timeout metrics_prefix log_level "
    "disable_log_requests distributed_executor_backend"
).split()

_SERVER_OPTIONS = in_order_of_help(_OWNERS, _RUNS)
SERVE_OPTIONS = [*MODEL_OPTIONS, *_SERVER_OPTIONS]
"""All of them, in the order of --help."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `tidewheel serve`, by the part that needs them.

    `shown` has all of them except secrets, by name. `notes` are for the log: what was given and has no effect.
    """

    engine: EngineOptions
    encoders: EncoderOptions
    app: AppOptions
    http: HttpOptions
    log: LogOptions
    replicas: ReplicaOptions
    shown: Mapping[str, Any]
    notes: Sequence[str] = field(default=(), compare=False)


_DESCRIPTION = """\
Serve a model over an OpenAI-compatible API.

what most people need:
  tidewheel serve                        the built-in model, on http://127.0.0.1:8000
  tidewheel serve OWNER/NAME             a model of the Hugging Face Hub
  tidewheel serve ./model-Q4_K_M.gguf    a file, or a folder
  --host 0.0.0.0 --port 80 --api-key KEY for other machines, which need a key
  --max-model-len 8k                     the longest conversation, in tokens
  --quantization int8                    half the memory of a model that is not quantized
  --served-model-name NAME               the model's name in the API
  --help=WORD                            the options that have to do with a word"""


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, *, prog: str = "tidewheel serve"
) -> ServeOptions:
    """The options of a command line, the file that it names and an environment, which go in this order.

    Prints what is wrong and exits with 2 if they are unusable.
    """
    parser = model_parser(prog, _DESCRIPTION)
    group = parser.add_argument_group("server")
    for option in _SERVER_OPTIONS:
        add_option(group, option)
    mistakes = Mistakes()
    parsed, notes = _read(parser, arguments, environment, mistakes)
    given = read_model_options(parsed, mistakes, environment)
    given |= read_given(_SERVER_OPTIONS, parsed, environment, mistakes)
    options = mistakes.attempt(_build, given, notes)
    parser.refuse(mistakes)
    return made(options)


def refuse_unknown_variables(mistakes: Mistakes, environment: Mapping[str, str] = os.environ) -> None:
    """Adds what is wrong with an environment that a command reads options from. There may be others of `serve`."""
    for sentence in unknown_variables(SERVE_OPTIONS, environment, vllm_flags()):
        mistakes.add(sentence)


def _build(given: Mapping[str, Any], notes: Sequence[str]) -> ServeOptions:
    """The options of what was given, by name. Raises OptionError, for all contradictions at once."""
    mistakes = Mistakes()
    names = given.get("served_model_name") or (() if "model" in given else (DEMO_MODEL_NAME,))
    engine, replicas = mistakes.attempt(engine_options, given), mistakes.attempt(build, ReplicaOptions, given)
    admission, limits = (
        mistakes.attempt(build, AdmissionLimits, given),
        mistakes.attempt(build, ConnectionLimits, given),
    )
    encoders = mistakes.attempt(build, EncoderOptions, given)
    app = mistakes.attempt(build, AppOptions, {**given, "served_model_name": names}, admission=admission)
    http, log = mistakes.attempt(build, HttpOptions, given, limits=limits), mistakes.attempt(build, LogOptions, given)
    if engine and replicas and engine.pipeline.stages > 1 and replicas.data_parallel_size > 1:
        mistakes.add(
            "--pipeline-parallel-size and --data-parallel-size do not work together: start several servers with "
            "stages, and let a proxy distribute requests among them (docs/scale-out.md)"
        )
    mistakes.raise_any()
    return ServeOptions(
        engine=made(engine),
        encoders=made(encoders),
        app=made(app),
        http=made(http),
        log=made(log),
        replicas=made(replicas),
        shown=shown_options(SERVE_OPTIONS, given),
        notes=[*notes, *made(replicas).without_effect(made(engine).pipeline.stages)],
    )


def _read(
    parser: OptionParser, arguments: Sequence[str], environment: Mapping[str, str], mistakes: Mistakes
) -> tuple[dict[str, Any], list[str]]:
    """What the command line gives by name, then the file, and what to log. `mistakes` gets what is wrong with any."""
    parsed, notes = _read_line(parser, arguments, mistakes)
    path = read_given(options_of(ConfigFileOptions), parsed, environment, mistakes).get("config")
    of_file = Mistakes(f"{path}: ")
    in_file, notes_of_file = _read_line(parser, mistakes.attempt(read_config_file, path) or () if path else (), of_file)
    in_environment = read_vllm_line(as_arguments(SERVE_OPTIONS, environment, vllm_flags()), parser.flags)
    for sentence in of_file.sentences:
        mistakes.add(sentence)
    refuse_unknown_variables(mistakes, environment)
    for sentence in in_environment.refusals:
        mistakes.add(sentence)
    notes += [*notes_of_file, *in_environment.notes, *idle_variables(SERVE_OPTIONS, environment)]
    if parsed.get("positional_model") is None:
        return {**in_file, **parsed, "positional_model": in_file.get("positional_model")}, notes
    in_file.pop("model", None)
    return {**in_file, **parsed}, notes


def _read_line(parser: OptionParser, arguments: Sequence[str], mistakes: Mistakes) -> tuple[dict[str, Any], list[str]]:
    """What a line gives by name, and what to log of it."""
    line = read_vllm_line(arguments, parser.flags)
    parsed = parser.read(line.ours, mistakes)
    for refusal in line.refusals:
        mistakes.add(refusal)
    return parsed, line.notes
