"""The options of the application: who may use it, what it serves under which names, and how it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from typing import Any

from tidewheel.engine.declaring.option import Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.declaring.values import above, at_least, count, json_object, number
from tidewheel.engine.models.generation import SAMPLING_NAMES

from .chat.parser_names import REASONING_PARSER_NAMES, TOOL_CALL_PARSER_ALIASES, TOOL_CALL_PARSER_NAMES
from .default_sampling import DEFAULT_SAMPLING
from .host_names import check_host
from .http.limits import AdmissionLimits
from .stores.opening import check_store

MAX_BODY = 16 * 2**20
MAX_BODY_WITH_IMAGES = 32 * 2**20
"""Bytes of a request's body by default, without and with images in it."""


def check_api_key(key: str) -> str | None:
    """A key as it may be sent in a header."""
    if not key or not key.isprintable() or any(character.isspace() for character in key):
        return "a key must have at least one character, and no spaces"
    return None


def _check_root_path(path: str) -> str | None:
    return None if path.startswith("/") else "must begin with a slash, like /api"


def _paths(text: str) -> list[str]:
    return [path.strip() for path in text.split(",") if path.strip()]


def _check_path(path: str) -> str | None:
    return None if path.startswith("/") else "must be a path that begins with a slash, like /health"


def _check_metrics_prefix(prefix: str) -> str | None:
    if re.fullmatch(r"[A-Za-z_:][A-Za-z0-9_:]*", prefix):
        return None
    return "must have letters, digits, underscores and colons only, like vllm:"


_NO_DEFAULTS = {
    "max_tokens": "did you mean max_new_tokens?",
    "max_completion_tokens": "did you mean max_new_tokens?",
    "max_length": "did you mean max_new_tokens, which counts only the answer?",
    "do_sample": "temperature 0 is greedy",
    "num_beams": "set use_beam_search in requests",
    "eos_token_id": "set stop_token_ids in requests",
    "stop_strings": "set stop in requests",
    "seed": "set it in requests",
}
"""Fields that the sampling defaults cannot have, and what to do instead."""


def _check_sampling_defaults(given: Mapping[str, Any]) -> str | None:
    unknown = []
    for name in sorted(given.keys() - {*SAMPLING_NAMES}):
        near = get_close_matches(name, SAMPLING_NAMES, 1)
        instead = _NO_DEFAULTS.get(name) or (f"did you mean {near[0]}?" if near else "")
        unknown.append(f"{name} ({instead})" if instead else name)
    return f"must have only {', '.join(SAMPLING_NAMES)}, not {', '.join(unknown)}" if unknown else None


def _strings(text: str) -> list[str]:
    """One string, or the strings of a JSON list, as vLLM's CORS options are given."""
    if not text.startswith("["):
        return [text]
    items = json.loads(text)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"must be a list of strings, got {text}")
    return list(items)


@record(frozen=True, kw_only=True)
class AppOptions(Options):
    """What the application needs to know besides the engine.

    Without keys none is asked for, without `allowed_origins` no page of another origin may read answers.
    `middleware` runs outermost first. What options name, files and import paths, is read by `find_resources`.
    """

    root_path: str | None = option(
        None,
        "the path that a proxy serves this server under, like /api",
        parse=lambda text: text.rstrip("/") or text,
        check=_check_root_path,
        metavar="PATH",
    )
    api_keys: Sequence[str] = option(
        (),
        "API keys, one of which clients must send; other users of this machine see them on the command line",
        flag="--api-key",
        check=check_api_key,
        metavar="KEY",
        env_aliases=("VLLM_API_KEY",),
        secret=True,
    )
    admin_api_keys: Sequence[str] = option(
        (),
        "more such keys, which may also change the server for everyone and prioritize their requests over others",
        flag="--admin-api-key",
        check=check_api_key,
        metavar="KEY",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "a file with more such keys, one a line, each as KEY [name=NAME] [admin] [priority]: keys with the same name "
        "belong to one tenant",
        metavar="FILE",
    )
    share_prefix_cache: bool = option(
        False, "let tenants, whose keys have different names, reuse each other's cached prefixes"
    )
    allowed_hosts: Sequence[str] = option(
        (),
        "names allowed in the Host header, without a port; *.example.com allows its subdomains, * all names [all]",
        check=check_host,
        metavar="HOST",
    )
    protect_health: bool = option(False, "require a key on /health, /ping and /version too")
    protect_metrics: bool = option(False, "require a key on /metrics and /load too")
    allowed_origins: Sequence[str] = option(
        (),
        "origins whose web pages may use this server from browsers, * for all [none]",
        parse=_strings,
        metavar="ORIGIN",
    )
    allow_credentials: bool = option(False, "let those pages send credentials such as cookies")
    allowed_methods: Sequence[str] = option(
        ("*",), "HTTP methods that those pages may use", parse=_strings, metavar="METHOD"
    )
    allowed_headers: Sequence[str] = option(
        ("*",), "HTTP headers that those pages may send", parse=_strings, metavar="HEADER"
    )
    middleware: Sequence[str] = option(
        (),
        "more middleware, by import path: an ASGI class, or an async function of a request and call_next",
        metavar="NAME",
    )
    request_id_headers: bool = option(
        True, "return each request's id as X-Request-Id", flag="--enable-request-id-headers"
    )
    served_model_names: Sequence[str] = option(
        (),
        "names of the model in the API [MODEL, or the last part of its path]",
        flag="--served-model-name",
        metavar="NAME",
    )
    skip_model_name_validation: bool = option(
        False,
        "answer requests for unknown models with this model, under its first name",
        env_aliases=("VLLM_SKIP_MODEL_NAME_VALIDATION",),
    )
    chat_template: str | None = option(None, "a chat template: a file, or the template itself", metavar="TEMPLATE")
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        'variables for the chat template, e.g. {"enable_thinking": false}; those of a request take precedence',
        parse=json_object,
        metavar="JSON",
    )
    trust_request_chat_template: bool = option(
        False, "allow requests to send their own chat templates, which are rendered in a process with limits"
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: auto uses the model's generation_config.json, vllm uses none; or a folder with the file",
        metavar="auto|vllm|FOLDER",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        "sampling defaults that override those of --generation-config, and max_new_tokens, which limits all answers, "
        'e.g. {"temperature": 0.2}',
        parse=json_object,
        check=_check_sampling_defaults,
        metavar="JSON",
    )
    default_sampling: str = option(
        "auto",
        "sampling if neither the request nor the model sets it: openai is temperature 1; chat is temperature 0.8, "
        "top_k 40, top_p 0.95 and min_p 0.05; auto is chat for the web page, `tidewheel chat` and Ollama's API, and "
        "openai for other requests",
        choices=DEFAULT_SAMPLING,
    )
    response_role: str = option("assistant", "the role of chat answers", metavar="NAME")
    return_tokens_as_token_ids: bool = option(
        False, "in logprobs, write tokens as token_id:ID, unless a request says otherwise"
    )
    enable_force_include_usage: bool = option(False, "end every stream with its usage, even if it was not requested")
    enable_auto_tool_choice: bool = option(False, "has no effect: calls are always returned as tool_calls")
    tool_call_parser: str = option(
        "auto",
        "the format of the model's tool calls; auto detects it in the chat template, none turns this off",
        parse=lambda text: TOOL_CALL_PARSER_ALIASES.get(text, text),
        choices=("auto", "none", *TOOL_CALL_PARSER_NAMES),
    )
    reasoning_parser: str = option(
        "auto",
        "the format of the model's reasoning, which is returned separately from the answer; auto and none are as for "
        "tool calls",
        choices=("auto", "none", *REASONING_PARSER_NAMES),
    )
    max_stored_responses: int = option(
        1000,
        "responses kept for previous_response_id and retrieval, in memory (256 MiB of them at most) or in the shared "
        "store; 0 keeps none",
        parse=count,
        check=at_least(0),
        metavar="N",
    )
    batch_dir: str | None = option(
        None, "a folder for uploaded files and batches: with it, /v1/files and /v1/batches are served", metavar="FOLDER"
    )
    shared_store: str | None = option(
        None,
        "storage shared by several replicas, for example for stored responses: a folder that all of them can access, "
        "or redis://HOST:PORT/DB of a server or a cluster, which needs the extra redis",
        check=check_store,
        metavar="FOLDER|URL",
        secret=True,
    )
    shared_store_password: str | None = option(
        None,
        "the password of a Redis store; other users of this machine see it on the command line",
        metavar="PASSWORD",
        secret=True,
    )
    web_ui: bool = option(True, "do not serve the page at /", flag="--disable-web-ui", turns_off=True)
    docs: bool = option(True, "do not serve /openapi.json and /docs", flag="--disable-fastapi-docs", turns_off=True)
    enable_tokenizer_info_endpoint: bool = option(
        False, "serve /tokenizer_info, which shows the tokenizer's special tokens and the chat template"
    )
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    unknown_parameters: str = option(
        "warn",
        "how to handle unknown parameters of requests: an error that names them, a line in the log (once for each "
        "name), or nothing",
        choices=("refuse", "warn", "ignore"),
    )
    max_body_bytes: int | None = option(
        None,
        "largest request body in bytes, e.g. 32M [16M; 32M for a model that sees images]",
        flag="--max-body-size",
        parse=count,
        check=at_least(1),
        env_aliases=("VLLM_HTTP_MAX_REQUEST_BODY_SIZE",),
        metavar="BYTES",
    )
    metrics_prefix: str = option(
        "tidewheel:",
        "prefix of the names of metrics; vllm: fits dashboards made for vLLM",
        check=_check_metrics_prefix,
        metavar="PREFIX",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send OpenTelemetry traces to this collector, e.g. http://localhost:4318/v1/traces; needs the extra otel",
        metavar="URL",
        secret=True,
    )
    log_requests: bool = option(
        True, "do not log a line for each finished request", flag="--disable-log-requests", turns_off=True
    )
    max_log_len: int | None = option(
        None,
        "log each request's prompt, cut to this many characters, or token ids if it has no text; 0 logs none [none]",
        parse=count,
        check=at_least(0),
        metavar="N",
    )
    enable_log_outputs: bool = option(
        False,
        "log each answer's text, cut to --max-log-len if that is given",
        env_aliases=("VLLM_DEBUG_LOG_API_SERVER_RESPONSE",),
    )
    log_stats: bool = option(
        True, "do not log a periodic line about throughput", flag="--disable-log-stats", turns_off=True
    )
    log_stats_interval: float = option(
        10.0,
        "interval of the lines about throughput; nothing is logged for an idle interval",
        parse=number,
        check=above(0),
        metavar="SECONDS",
        env_aliases=("VLLM_LOG_STATS_INTERVAL",),
    )
    log_access: bool = option(
        True,
        "do not log a line for each HTTP response",
        flag="--disable-access-log",
        turns_off=True,
        flag_aliases=("--disable-uvicorn-access-log",),
    )
    disable_access_log_for_endpoints: Sequence[str] = option(
        ("/health", "/metrics", "/ping"),
        "paths, optionally separated by commas, whose responses are logged only if they are errors; an empty value "
        "means none",
        parse=_paths,
        check=_check_path,
        metavar="PATHS",
    )

    def body_limit(self, *, has_images: bool) -> int:
        """The largest body of a request in bytes, by what it may have in it."""
        return self.max_body_bytes or (MAX_BODY_WITH_IMAGES if has_images else MAX_BODY)

    def without_effect(self) -> Iterator[str]:
        """What to tell of the flags that were given and have no effect."""
        if self.given_flags(["enable_auto_tool_choice"]):
            yield "--enable-auto-tool-choice has no effect: calls are returned as tool_calls without it"
        if self.max_log_len is not None and not self.log_requests:
            yield "--max-log-len has no effect: --disable-log-requests turns off the log of requests"
        if not self.log_stats and self.given_flags(["log_stats_interval"]):
            yield "--log-stats-interval has no effect: --disable-log-stats turns these lines off"
        if not self.log_access and self.given_flags(["disable_access_log_for_endpoints"]):
            yield "--disable-access-log-for-endpoints has no effect: --disable-access-log turns off all such lines"

    def _contradictions(self) -> Iterator[str]:
        if self.enable_log_outputs and not self.log_requests:
            yield "--enable-log-outputs needs --enable-log-requests: drop --disable-log-requests"
        if self.enable_auto_tool_choice and self.tool_call_parser == "none":
            yield "--enable-auto-tool-choice needs a --tool-call-parser other than none"
        if self.shared_store_password is not None and "://" not in (self.shared_store or ""):
            yield "--shared-store-password needs a --shared-store with a redis:// URL"
        if not self.allowed_origins:
            yield from self._needing(("allow_credentials", "allowed_methods", "allowed_headers"), "--allowed-origins")
