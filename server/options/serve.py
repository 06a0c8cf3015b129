"""Every option of `tidewheel serve`, once: its name, type, default and help."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..chat.reasoning import REASONING_PARSERS
from ..chat.tools import TOOL_CALL_PARSERS
from .parser import OptionError, OptionParser, add_options, build_options, flag, option
from .values import (
    api_key,
    certificate_requirement,
    count,
    dtype_name,
    gibibytes,
    json_object,
    kv_cache_dtype_name,
    metrics_prefix,
    not_negative_number,
    port_number,
    positive_count,
    positive_number,
    strings,
    time_limit,
    url_prefix,
)


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
        "store weights in fewer bits; they are quantized while they are loaded [no; int8-channel for the embedded demo "
        "model, unless --dtype is given]",
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
        "cores to compute on, e.g. 0-29, or 0-31|32-63 for groups of threads, one a NUMA node; auto makes these of all "
        "cores that the process may use",
        metavar="CORES",
        env_aliases=("VLLM_CPU_OMP_THREADS_BIND",),
    )
    seed: int = option(0, "seeds the random weights of --load-format dummy", parse=int, metavar="N")
    step_timeout: float | None = option(
        120.0,
        "write all threads' stacks to stderr when a step takes longer; 0 never does",
        parse=time_limit,
        metavar="SECONDS",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How it is served."""

    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0 is every one")
    port: int = option(8000, "the port to listen on; 0 lets the system choose", parse=port_number)
    uds: str | None = option(None, "a Unix socket to listen on instead of host and port", metavar="PATH")
    root_path: str | None = option(
        None, "the path that a proxy serves this server under, like /api", parse=url_prefix, metavar="PATH"
    )
    api_key: tuple[str, ...] = option(
        (),
        "keys that clients must send one of; other users of this machine see them on the command line",
        parse=api_key,
        metavar="KEY",
        env_aliases=("VLLM_API_KEY",),
        secret=True,
    )
    api_key_file: str | None = option(None, "a file with more such keys, one a line", metavar="FILE")
    protect_health: bool = option(False, "ask for a key on /health, /ping and /version too")
    protect_metrics: bool = option(False, "ask for a key on /metrics and /load too")
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins whose web pages may use this server from browsers, * for all [none]",
        parse=strings,
        metavar="ORIGIN",
    )
    allow_credentials: bool = option(False, "let those pages send credentials such as cookies")
    allowed_methods: tuple[str, ...] = option(
        ("*",), "HTTP methods that those pages may use [*]", parse=strings, metavar="METHOD"
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), "HTTP headers that those pages may send [*]", parse=strings, metavar="HEADER"
    )
    ssl_certfile: str | None = option(None, "serve TLS with this certificate chain (PEM)", metavar="FILE")
    ssl_keyfile: str | None = option(
        None, "the certificate's key (PEM, without a password) [in the certificate's file]", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(None, "certificates that sign those of clients (PEM)", metavar="FILE")
    ssl_cert_reqs: str = option(
        "none",
        "whether clients must show a certificate",
        parse=certificate_requirement,
        choices=("none", "optional", "required"),
    )
    middleware: tuple[str, ...] = option(
        (),
        "more middleware, by import path: an ASGI class, or an async function of a request and call_next",
        metavar="NAME",
    )
    enable_request_id_headers: bool = option(True, "return each request's id as X-Request-Id")
    served_model_name: tuple[str, ...] = option((), "names of the model in the API [as MODEL]", metavar="NAME")
    chat_template: str | None = option(None, "a chat template: a file, or the template itself", metavar="TEMPLATE")
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'variables for the chat template, e.g. {"enable_thinking": false}; those of a request go first',
        parse=json_object,
        metavar="JSON",
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring chat templates of their own, rendered in a bounded process"
    )
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
    enable_auto_tool_choice: bool = option(False, "has no effect: calls are always returned as tool_calls")
    tool_call_parser: str = option(
        "auto",
        "the format of the model's tool calls; auto finds it in the chat template, none looks for none",
        choices=("auto", "none", *TOOL_CALL_PARSERS),
    )
    reasoning_parser: str = option(
        "auto",
        "the format of the model's reasoning, which is returned apart from the answer; auto and none as above",
        choices=("auto", "none", *REASONING_PARSERS),
    )
    max_stored_responses: int = option(
        1000,
        "responses kept in memory for previous_response_id and retrieval, 256 MiB of them at most; 0 keeps none",
        parse=count,
        metavar="N",
    )
    disable_web_ui: bool = option(False, "do not serve the page at /")
    disable_fastapi_docs: bool = option(False, "do not serve /openapi.json and /docs")
    max_queue: int = option(
        4096,
        "most sequences that may wait, by an estimate of what fits into the KV cache; further requests get a 429",
        parse=count,
        metavar="N",
    )
    max_prompts: int = option(1024, "most prompts of one request", parse=positive_count, metavar="N")
    max_n: int = option(128, "most choices (n, best_of) of one prompt", parse=positive_count, metavar="N")
    unknown_parameters: str = option(
        "refuse",
        "what becomes of a request's parameters that do not exist: an error that names them, a line in the log (once a "
        "name), or nothing",
        choices=("refuse", "warn", "ignore"),
    )
    max_body_size: int = option(
        16 * 2**20, "largest request body in bytes, e.g. 32M", parse=positive_count, metavar="BYTES"
    )
    max_answer_size: int = option(
        64 * 2**20,
        "largest answer in bytes, e.g. 64M, by an estimate from a request's prompts, tokens, choices and logprobs",
        parse=positive_count,
        metavar="BYTES",
    )
    max_header_size: int = option(
        64 * 2**10,
        "largest head of a request in bytes",
        parse=positive_count,
        metavar="BYTES",
        flag_aliases=("--h11-max-incomplete-event-size",),
    )
    max_header_count: int = option(
        256, "most headers of a request", parse=positive_count, metavar="N", flag_aliases=("--h11-max-header-count",)
    )
    request_timeout: float | None = option(
        None,
        "longest that an answer may take, from the request's arrival [no limit]",
        parse=time_limit,
        metavar="SECONDS",
    )
    read_timeout: float | None = option(
        30.0,
        "how long a request may take to come in, and a second more for each 500 bytes; 0 is no limit",
        parse=time_limit,
        metavar="SECONDS",
    )
    write_timeout: float | None = option(
        60.0, "how long a client may leave its answer unread; 0 is no limit", parse=time_limit, metavar="SECONDS"
    )
    shutdown_timeout: float = option(
        30.0, "how long running answers may go on after SIGTERM", parse=not_negative_number, metavar="SECONDS"
    )
    metrics_prefix: str = option(
        "tidewheel:",
        "begins the names of metrics; vllm: suits dashboards made for it",
        parse=metrics_prefix,
        metavar="PREFIX",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send OpenTelemetry traces to this collector, e.g. http://localhost:4318/v1/traces; needs the extra otel",
        metavar="URL",
        secret=True,
    )
    log_level: str = option(
        "info",
        "what is logged",
        choices=("debug", "info", "warning", "error", "critical"),
        flag_aliases=("--uvicorn-log-level",),
    )
    log_format: str = option(
        "text", "lines for people, or a JSON object a line for collectors", choices=("text", "json")
    )
    disable_log_requests: bool = option(False, "do not log a line for each finished request")
    disable_access_log: bool = option(
        False, "do not log a line for each HTTP response", flag_aliases=("--disable-uvicorn-access-log",)
    )


def parse_options(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, *, prog: str = "tidewheel serve"
) -> tuple[ModelOptions, ServerOptions]:
    """The options of a command line and an environment. Prints what is wrong and exits with 2 if they are unusable."""
    parser = model_parser(prog, "Serve a model over an OpenAI-compatible API.")
    group = parser.add_argument_group("server")
    add_options(group, ServerOptions)
    given = vars(parser.parse_known(arguments))
    model_options = read_model_options(parser, given, environment)
    try:
        server_options = build_options(ServerOptions, given, environment)
    except OptionError as error:
        parser.error(str(error))
    models, names = server_options.embedding_model, server_options.served_embedding_model_name
    if names and len(names) != len(models):
        parser.error(f"--served-embedding-model-name needs {len(models)} names, one for each --embedding-model")
    if len(set(names or models)) != len(models):
        parser.error("two embedding models have one name: give each its own with --served-embedding-model-name")
    if reason := _contradiction(server_options):
        parser.error(reason)
    return model_options, server_options


def public_options(*groups: ModelOptions | ServerOptions) -> dict[str, Any]:
    """The values of all options but the secret ones."""
    named = [(spec, getattr(group, spec.name)) for group in groups for spec in fields(group)]
    return {spec.name: value for spec, value in named if not spec.metadata["secret"]}


def _contradiction(options: ServerOptions) -> str | None:
    """What is wrong with options that are fine one by one."""
    if options.enable_auto_tool_choice and options.tool_call_parser == "none":
        return "--enable-auto-tool-choice needs a --tool-call-parser other than none"
    if not options.allowed_origins:
        for name in ("allow_credentials", "allowed_methods", "allowed_headers"):
            if getattr(options, name) != getattr(ServerOptions, name):
                return f"{flag(name)} needs --allowed-origins"
    if options.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(options, name) != getattr(ServerOptions, name):
                return f"{flag(name)} needs --ssl-certfile"
    if (options.ssl_ca_certs is None) != (options.ssl_cert_reqs == "none"):
        return "clients are checked with both --ssl-ca-certs FILE and --ssl-cert-reqs optional or required"
    return None


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
    add_options(group, ModelOptions)
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
        return build_options(ModelOptions, given, environment)
    except OptionError as error:
        parser.error(str(error))
