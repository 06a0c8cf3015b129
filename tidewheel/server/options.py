"""Every option of `tidewheel serve`, once: its flag, environment variables, type, default and help.

A value comes from the command line, else from the environment variable `TIDEWHEEL_<FLAG>` (`--max-model-len` is
`TIDEWHEEL_MAX_MODEL_LEN`; lists are separated by spaces, switches are 1 or 0), else from one of the option's aliases,
else it is the default.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from tidewheel.server.chat.reasoning import REASONING_PARSERS
from tidewheel.server.chat.tools import TOOL_CALL_PARSERS

ENV_PREFIX = "TIDEWHEEL_"

_DTYPES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPES = {**_DTYPES, "fp8": "fp8_e5m2"}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def count(text: str) -> int:
    """A number such as 4096, 4k (4,000), 4K (4,096), 1.5k or 1m. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 4k or 4K")
    value = float(match[1]) * _COUNT_UNITS[match[2]]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def positive_count(text: str) -> int:
    """A `count` of at least 1."""
    value = count(text)
    if value < 1:
        raise ValueError(f"must be at least 1, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A number above 0. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above 0, got {text!r}")
    return value


def gibibytes(text: str) -> float | None:
    """An amount of memory; 0 leaves it to the server. Raises ValueError."""
    return not_negative_number(text) or None


def not_negative_number(text: str) -> float:
    """A number of at least 0. Raises ValueError."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be at least 0, got {text!r}")
    return value


def port_number(text: str) -> int:
    """A TCP port; 0 lets the system choose. Raises ValueError."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError(f"must be between 0 and 65535, got {text!r}")
    return value


def dtype_name(text: str) -> str:
    """A dtype under its full name."""
    return _DTYPES.get(text, text)


def kv_cache_dtype_name(text: str) -> str:
    """A KV cache's dtype under its full name."""
    return _KV_CACHE_DTYPES.get(text, text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {text!r}")
    return value


def switch(text: str) -> bool:
    """An environment variable's 1 or 0. Raises ValueError."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be 1 or 0, got {text!r}") from None


def option(
    default: Any,
    help_text: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    env_aliases: Sequence[str] = (),
    flag_aliases: Sequence[str] = (),
) -> Any:
    """A dataclass field that is an option. A bool is a switch, a tuple takes several values."""
    metadata = {
        "help": help_text,
        "parse": parse,
        "choices": choices,
        "metavar": metavar,
        "env_aliases": tuple(env_aliases),
        "flag_aliases": tuple(flag_aliases),
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is served and on what: handed to the engine as they are, and with its defaults."""

    model: str | None = option(None, "a folder or a Hugging Face hub id [the embedded demo model]")
    revision: str | None = option(None, "the hub's branch, tag or commit", metavar="NAME")
    download_dir: str | None = option(None, "where hub downloads are kept [the hub's cache]", metavar="FOLDER")
    load_format: str = option(
        "auto", "where weights come from; dummy makes random ones", choices=("auto", "safetensors", "dummy")
    )
    tokenizer: str | None = option(None, "a folder or hub id to take the tokenizer from [the model's]")
    dtype: str = option(
        "auto",
        "the weights' type (half and float are float16 and float32)",
        parse=dtype_name,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "store weights in fewer bits; they are quantized while they are loaded",
        choices=("int8", "int8-channel", "int4"),
    )
    quantization_group_size: int | None = option(
        None, "inputs that share a scale in int4 weights: 32, 64 or 128 [32]", parse=positive_count, metavar="N"
    )
    quantization_zero_points: bool = option(False, "int4 weights with zero points")
    cache_dir: str | None = option(
        None,
        "keep weights here as they lie in memory, for faster starts; any file there may be deleted [none are kept]",
        metavar="FOLDER",
    )
    kv_cache_dtype: str = option(
        "auto",
        "the type of K and V in the cache (fp8 is fp8_e5m2); auto is as the weights",
        parse=kv_cache_dtype_name,
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e5m2", "int8"),
    )
    device: str = option("auto", "what runs the model", choices=("auto", "cpu", "torch"))
    max_model_len: int | None = option(
        None, "the context in tokens, e.g. 4096, 4k or 4K [the model's]", parse=positive_count, metavar="TOKENS"
    )
    max_num_seqs: int = option(128, "most sequences in one step", parse=positive_count, metavar="N")
    max_num_batched_tokens: int = option(2048, "most tokens in one step", parse=positive_count, metavar="TOKENS")
    max_step_ms: float = option(
        75.0, "how long prompts may hold up running answers, a step", parse=positive_number, metavar="MS"
    )
    kv_cache_space: float | None = option(
        None,
        "memory for the KV cache in GiB [a share of what is free]",
        parse=gibibytes,
        metavar="GIB",
        env_aliases=("VLLM_CPU_KVCACHE_SPACE",),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts that begin alike")
    threads_bind: str = option(
        "auto",
        "cores to compute on, e.g. 0-29, or 0-31|32-63 for a group a NUMA node; auto is all that the process may use",
        metavar="CORES",
        env_aliases=("VLLM_CPU_OMP_THREADS_BIND",),
    )
    seed: int = option(0, "seeds the random weights of --load-format dummy", parse=int, metavar="N")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How it is served."""

    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0 is every one")
    port: int = option(8000, "the port to listen on; 0 lets the system choose", parse=port_number)
    api_key: tuple[str, ...] = option((), "keys that clients must send one of", metavar="KEY")
    served_model_name: tuple[str, ...] = option((), "names of the model in the API [as MODEL]", metavar="NAME")
    chat_template: str | None = option(None, "a chat template: a file, or the template itself", metavar="TEMPLATE")
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'variables for the chat template, e.g. {"enable_thinking": false}; those of a request go first',
        parse=json_object,
        metavar="JSON",
    )
    trust_request_chat_template: bool = option(False, "let requests bring chat templates of their own")
    embedding_model: tuple[str, ...] = option(
        (), "embedding models and cross-encoders in ONNX to serve too: folders or hub ids", metavar="MODEL"
    )
    served_embedding_model_name: tuple[str, ...] = option(
        (), "their names in the API, one each [as --embedding-model]", metavar="NAME"
    )
    embedding_threads: int = option(
        1, "threads that they compute on, together and after the chat model's", parse=positive_count, metavar="N"
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: auto takes the model's generation_config.json, vllm takes none, or a folder with the file",
        metavar="auto|vllm|FOLDER",
    )
    enable_auto_tool_choice: bool = option(False, "return calls in the model's text as tool_calls")
    tool_call_parser: str | None = option(
        None, "the format of the model's tool calls", choices=tuple(TOOL_CALL_PARSERS)
    )
    reasoning_parser: str | None = option(
        None, "return the model's reasoning apart from its answer", choices=tuple(REASONING_PARSERS)
    )
    disable_web_ui: bool = option(False, "do not serve the page at /")
    disable_fastapi_docs: bool = option(False, "do not serve /openapi.json and /docs")
    max_body_size: int = option(
        32 * 2**20, "largest request body in bytes, e.g. 32M", parse=positive_count, metavar="BYTES"
    )
    shutdown_timeout: float = option(
        30.0, "how long running answers may go on after SIGTERM", parse=not_negative_number, metavar="SECONDS"
    )
    log_level: str = option(
        "info",
        "what is logged",
        choices=("debug", "info", "warning", "error", "critical"),
        flag_aliases=("--uvicorn-log-level",),
    )
    disable_log_requests: bool = option(False, "do not log a line for each finished request")
    disable_access_log: bool = option(
        False, "do not log a line for each HTTP response", flag_aliases=("--disable-uvicorn-access-log",)
    )


OptionsT = TypeVar("OptionsT", bound=ModelOptions | ServerOptions)


class OptionError(Exception):
    """A command line or an environment that cannot be used."""


class OptionParser(argparse.ArgumentParser):
    """An argparse parser that suggests the closest option for one that does not exist."""

    def parse_known(self, arguments: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(list(arguments))
        if unknown:
            name = unknown[0].split("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, 1)
            hint = f"; did you mean {close[0]}?" if close and name.startswith("-") else ""
            what = "option" if name.startswith("-") else "argument"
            self.error(f"unknown {what} {name}{hint} (see --help)")
        return namespace

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, *, prog: str = "tidewheel serve"
) -> tuple[ModelOptions, ServerOptions]:
    """The options of a command line and an environment. Prints what is wrong and exits with 2 if they are unusable."""
    parser = model_parser(prog, "Serve a model over an OpenAI-compatible API.")
    group = parser.add_argument_group("server")
    for spec in fields(ServerOptions):
        _add_option(group, spec.name, spec.default, spec.metadata)
    given = vars(parser.parse_known(arguments))
    model_options = read_model_options(parser, given, environment)
    try:
        server_options = _build(ServerOptions, given, environment)
    except OptionError as error:
        parser.error(str(error))
    if server_options.enable_auto_tool_choice != (server_options.tool_call_parser is not None):
        parser.error("--enable-auto-tool-choice and --tool-call-parser go together")
    models, names = server_options.embedding_model, server_options.served_embedding_model_name
    if names and len(names) != len(models):
        parser.error(f"--served-embedding-model-name needs {len(models)} names, one for each --embedding-model")
    if len(set(names or models)) != len(models):
        parser.error("two embedding models have one name: give each its own with --served-embedding-model-name")
    return model_options, server_options


def model_parser(prog: str, description: str) -> OptionParser:
    """A parser for a command that runs a model: it knows MODEL and the options of ModelOptions."""
    parser = OptionParser(
        prog=prog,
        description=description,
        epilog="Each option may also be given as an environment variable: --max-model-len as "
        "TIDEWHEEL_MAX_MODEL_LEN. The command line goes first.",
        allow_abbrev=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    group = parser.add_argument_group("model")
    for spec in fields(ModelOptions):
        _add_option(group, spec.name, spec.default, spec.metadata)
    return parser


def read_model_options(
    parser: OptionParser, given: dict[str, Any], environment: Mapping[str, str] = os.environ
) -> ModelOptions:
    """The model's options of what `model_parser` parsed and an environment; exits with 2 if they are unusable."""
    positional = given.pop("positional_model", None)
    if positional is not None:
        if given.get("model") not in (None, positional):
            parser.error(f"two models: {positional} and --model {given['model']}")
        given["model"] = positional
    try:
        return _build(ModelOptions, given, environment)
    except OptionError as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_option(group: argparse._ArgumentGroup, name: str, default: Any, metadata: Mapping[str, Any]) -> None:
    flags = [_flag(name), *metadata["flag_aliases"]]
    help_text = metadata["help"]
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        help_text += f" [{default}]"
    for alias in metadata["env_aliases"]:
        help_text += f" (also ${alias})"
    shared: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text.replace("%", "%%")}
    if isinstance(default, bool):
        action: Any = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(*flags, action=action, **shared)
        return
    shared["type"] = argument_type(metadata["parse"])
    shared["choices"] = metadata["choices"]
    shared["metavar"] = metadata["metavar"]
    if isinstance(default, tuple):
        group.add_argument(*flags, nargs="+", action="extend", **shared)
    else:
        group.add_argument(*flags, **shared)


def argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as an argparse type whose ValueError's own words reach the user."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _build(group_type: type[OptionsT], given: Mapping[str, Any], environment: Mapping[str, str]) -> OptionsT:
    values: dict[str, Any] = {}
    for spec in fields(group_type):
        if spec.name in given:
            value = given[spec.name]
            values[spec.name] = tuple(value) if isinstance(spec.default, tuple) else value
            continue
        for variable in (ENV_PREFIX + spec.name.upper(), *spec.metadata["env_aliases"]):
            if environment.get(variable):
                values[spec.name] = _from_environment(variable, environment[variable], spec.default, spec.metadata)
                break
    return group_type(**values)


def _from_environment(variable: str, text: str, default: Any, metadata: Mapping[str, Any]) -> Any:
    try:
        if isinstance(default, bool):
            return switch(text)
        if isinstance(default, tuple):
            return tuple(metadata["parse"](item) for item in text.split())
        value = metadata["parse"](text)
    except ValueError as error:
        raise OptionError(f"${variable}: {error}") from None
    choices = metadata["choices"]
    if choices is not None and value not in choices:
        raise OptionError(f"${variable}: must be one of {', '.join(choices)}, got {text!r}")
    return value
