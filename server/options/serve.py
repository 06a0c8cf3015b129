"""Every option of `tidewheel serve`, put together from those who use them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import options_of
from tidewheel.engine.declaring.record import record
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.options import EngineOptions

from ..app_options import AppOptions
from ..http.limits import AdmissionLimits, ConnectionLimits
from ..http.options import HttpOptions
from ..telemetry.logs import LogOptions
from .config_file import ConfigFileOptions, read_config_file
from .hosting import HostingOptions, ModelSection, split_named
from .model import DEMO_MODEL, DEMO_MODEL_NAME, MODEL_OPTIONS, engine_options, model_parser, read_model_options
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
    HostingOptions,
)
_RUNS = (
    "config host root_path ssl_certfile middleware runner models_dir generation_config max_queue unknown_parameters "
    "max_answer_size max_header_size request_timeout read_timeout shutdown_timeout metrics_prefix log_level "
    "disable_log_requests distributed_executor_backend"
).split()

_SERVER_OPTIONS = in_order_of_help(_OWNERS, _RUNS)
SERVE_OPTIONS = [*MODEL_OPTIONS, *_SERVER_OPTIONS]
"""All of them, in the order of --help."""

_NAMES = ("model", "served_model_name", "embedding_model", "served_embedding_model_name")
_OF_ONE_MODEL = (
    "served_model_name revision tokenizer tokenizer_revision quantization_param_path lora_modules "
    "lora_resolver_cache_dir mmproj pooler_config"
).split()
"""Options that are right for one model at most."""
_OF_ENGINES = frozenset(o.name for o in MODEL_OPTIONS)
_OF_ENCODERS = frozenset("download_dir device dtype quantization threads_bind reserved_cpus cache_dir".split())
"""Those that encoders have as well."""


@record(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `tidewheel serve`, by the part that needs them.

    `shown` has all of them except secrets, by name. `notes` are for the log: what was given and has no effect.

    A server of several models has `models`, those that were named, and perhaps others in a folder. Its `given` are the
    options that all of them have, by name, and `engine`, `encoders` and `app` are made of these without a model; see
    `options_of_model`.
    """

    engine: EngineOptions
    encoders: EncoderOptions
    app: AppOptions
    http: HttpOptions
    log: LogOptions
    replicas: ReplicaOptions
    shown: Mapping[str, Any]
    notes: Sequence[str] = field(default=(), compare=False)
    hosting: HostingOptions = field(default_factory=HostingOptions)
    models: Sequence[ModelSection] = ()
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def hosts(self) -> bool:
        """Whether models are loaded when requests name them, and not one at the start."""
        return bool(self.models) or self.hosting.models_dir is not None


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
  --models-dir FOLDER                    all models of a folder, each loaded when a request names it
  --help=WORD                            the options that have to do with a word"""


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, *, prog: str = "tidewheel serve"
) -> ServeOptions:
    """The options of a command line, the file that it names and an environment, which go in this order.

    Prints what is wrong and exits with 2 if they are unusable.
    """
    parser = model_parser(prog, _DESCRIPTION, takes_several=True)
    group = parser.add_argument_group("server")
    for option in _SERVER_OPTIONS:
        add_option(group, option)
    mistakes = Mistakes()
    parsed, sections, notes = _read(parser, arguments, environment, mistakes)
    several = _take_several(parsed)
    given = read_model_options(parsed, mistakes, environment)
    given |= read_given(_SERVER_OPTIONS, parsed, environment, mistakes)
    if several or sections is not None or any(o.name in given for o in options_of(HostingOptions)):
        options = mistakes.attempt(_build_several, given, several, sections, notes)
    else:
        options = mistakes.attempt(_build, given, notes)
    parser.refuse(mistakes)
    return made(options)


def _take_several(parsed: dict[str, Any]) -> list[str]:
    """The models of a command line that names several, out of it. The only one of another is left there as a text."""
    texts = list(dict.fromkeys(parsed.pop("model", ())))
    positional = parsed.get("positional_model")
    if positional is not None and (len(texts) > 1 or any(split_named(text)[0] for text in texts)):
        texts.insert(0, parsed.pop("positional_model"))
    if len(texts) == 1:
        parsed["model"] = texts.pop()
    return texts


def refuse_unknown_variables(mistakes: Mistakes, environment: Mapping[str, str] = os.environ) -> None:
    """Adds what is wrong with an environment that a command reads options from. There may be others of `serve`."""
    for sentence in unknown_variables(SERVE_OPTIONS, environment, vllm_flags()):
        mistakes.add(sentence)


def _build(given: Mapping[str, Any], notes: Sequence[str]) -> ServeOptions:
    """The options of what was given, by name. Raises OptionError, for all contradictions at once."""
    mistakes = Mistakes()
    names = tuple(given.get("served_model_name") or ())
    name, where = split_named(given["model"]) if "model" in given else (DEMO_MODEL_NAME if not names else None, None)
    if name is not None:
        names = tuple(dict.fromkeys((name, *names)))
    model = {} if where is None else {"model": where}
    parts = mistakes.attempt(_model_parts, {**given, **model, "served_model_name": names})
    http, log, replicas = mistakes.attempt(_server_parts, given) or (None, None, None)
    if parts and replicas and parts[0].pipeline.stages > 1 and replicas.data_parallel_size > 1:
        mistakes.add(
            "--pipeline-parallel-size and --data-parallel-size do not work together: start several servers with "
            "stages, and let a proxy distribute requests among them (docs/scale-out.md)"
        )
    mistakes.raise_any()
    engine, encoders, app = made(parts)
    return ServeOptions(
        engine=engine,
        encoders=encoders,
        app=app,
        http=made(http),
        log=made(log),
        replicas=made(replicas),
        shown=shown_options(SERVE_OPTIONS, given),
        notes=[*notes, *made(replicas).without_effect(engine.pipeline.stages)],
    )


def _build_several(
    given: Mapping[str, Any], texts: Sequence[str], sections: object, notes: Sequence[str]
) -> ServeOptions:
    """The options of a server of several models: `texts` of its command line, and `sections` of its file."""
    from . import model_sections as of_models

    mistakes = Mistakes()
    of_file, notes_of_file = of_models.read_sections(sections, _SERVER_OPTIONS, mistakes) if sections else ([], [])
    named = texts or ([given["model"]] if "model" in given else ())
    line = [*of_models.line_sections(named, mistakes), *of_models.embedding_sections(given, mistakes)]
    if not (line or of_file or "models_dir" in given):
        line = [ModelSection(name=DEMO_MODEL_NAME, where=str(DEMO_MODEL))]
    shared = {name: value for name, value in given.items() if name not in _NAMES}
    if len(line) == 1 and not of_file and "models_dir" not in given:
        line = [of_models.alone(line[0], shared, given.get("served_model_name", ()))]
    else:
        for option in SERVE_OPTIONS:
            if option.name in _OF_ONE_MODEL and option.name in given:
                shared.pop(option.name, None)
                mistakes.add(
                    f"{option.flag} is for one model: give it in the model's section of models: in the --config file"
                )
    models = of_models.joined_sections(line, of_file, mistakes)
    hosting = mistakes.attempt(build, HostingOptions, given)
    http, log, replicas = mistakes.attempt(_server_parts, given) or (None, None, None)
    parts = mistakes.attempt(_model_parts, {**shared, "model": ""})
    if parts and parts[0].pipeline.stages > 1:
        mistakes.add("--pipeline-parallel-size is for a server of one model: leave it out, or serve one model")
    if parts is None or hosting is None or http is None:
        mistakes.raise_any()
    engine, encoders, app = made(parts)
    options = ServeOptions(
        engine=engine,
        encoders=encoders,
        app=app,
        http=made(http),
        log=made(log),
        replicas=made(replicas),
        shown=shown_options(SERVE_OPTIONS, given),
        notes=[*notes, *notes_of_file, *made(replicas).without_effect(1)],
        hosting=made(hosting),
        models=models,
        given=shared,
    )
    of_all, of_models_alone = [*app.without_effect()], []
    for section in models:
        of_model = Mistakes(f"models: {section.name}: ")
        one = of_model.attempt(options_of_model, options, section, section.where or "")
        for sentence in of_model.sentences:
            mistakes.add(sentence)
        idle = () if one is None else one.app.without_effect()
        of_models_alone += [f"models: {section.name}: {note}" for note in idle if note not in of_all]
    mistakes.raise_any()
    return replace(options, notes=[*options.notes, *of_models_alone])


def options_of_model(
    options: ServeOptions, section: ModelSection, where: str, *, is_encoder: bool = False
) -> ServeOptions:
    """The options of one model of a server of several: its own, and for the rest those that all have.

    `where` is the model's folder, file or hub id. With `is_encoder` it has no options that are for models that
    generate, except its own: they are meant for others. Raises OptionError.
    """
    kept = _OF_ENCODERS if is_encoder else None
    shared = {n: value for n, value in options.given.items() if kept is None or n in kept or n not in _OF_ENGINES}
    if is_encoder and shared.get("quantization") != "int8":
        shared.pop("quantization", None)
    given = {**shared, **section.given, "served_model_name": (section.name, *section.aliases)}
    if where != str(DEMO_MODEL):  # which else would not be quantized as it is when it is the only model
        given["model"] = where
    engine, encoders, app = _model_parts(given)
    return replace(
        options, engine=engine, encoders=encoders, app=app, shown=shown_options(SERVE_OPTIONS, given), models=()
    )


def _model_parts(given: Mapping[str, Any]) -> tuple[EngineOptions, EncoderOptions, AppOptions]:
    """The options that a model has its own of. Raises OptionError."""
    mistakes = Mistakes()
    engine, encoders = mistakes.attempt(engine_options, given), mistakes.attempt(build, EncoderOptions, given)
    admission = mistakes.attempt(build, AdmissionLimits, given)
    app = mistakes.attempt(build, AppOptions, given, admission=admission)
    mistakes.raise_any()
    return made(engine), made(encoders), made(app)


def _server_parts(given: Mapping[str, Any]) -> tuple[HttpOptions, LogOptions, ReplicaOptions]:
    """The options that a server has once. Raises OptionError."""
    mistakes = Mistakes()
    replicas, limits = mistakes.attempt(build, ReplicaOptions, given), mistakes.attempt(build, ConnectionLimits, given)
    http, log = mistakes.attempt(build, HttpOptions, given, limits=limits), mistakes.attempt(build, LogOptions, given)
    mistakes.raise_any()
    return made(http), made(log), made(replicas)


def _read(
    parser: OptionParser, arguments: Sequence[str], environment: Mapping[str, str], mistakes: Mistakes
) -> tuple[dict[str, Any], object, list[str]]:
    """What the command line gives by name, then the file, the file's sections of models, and what to log.

    `mistakes` gets what is wrong with any.
    """
    parsed, notes = _read_line(parser, arguments, mistakes)
    path = read_given(options_of(ConfigFileOptions), parsed, environment, mistakes).get("config")
    of_file = Mistakes(f"{path}: ")
    line, sections = (mistakes.attempt(read_config_file, path) if path else None) or ((), None)
    in_file, notes_of_file = _read_line(parser, line, of_file)
    in_environment = read_vllm_line(as_arguments(SERVE_OPTIONS, environment, vllm_flags()), parser.flags)
    for sentence in of_file.sentences:
        mistakes.add(sentence)
    refuse_unknown_variables(mistakes, environment)
    for sentence in in_environment.refusals:
        mistakes.add(sentence)
    notes += [*notes_of_file, *in_environment.notes, *idle_variables(SERVE_OPTIONS, environment)]
    if parsed.get("positional_model") is None:
        return {**in_file, **parsed, "positional_model": in_file.get("positional_model")}, sections, notes
    in_file.pop("model", None)
    return {**in_file, **parsed}, sections, notes


def _read_line(parser: OptionParser, arguments: Sequence[str], mistakes: Mistakes) -> tuple[dict[str, Any], list[str]]:
    """What a line gives by name, and what to log of it."""
    line = read_vllm_line(arguments, parser.flags)
    parsed = parser.read(line.ours, mistakes)
    for refusal in line.refusals:
        mistakes.add(refusal)
    return parsed, line.notes
