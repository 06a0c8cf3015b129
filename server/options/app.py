"""What the application needs to know besides the engine, and reading it from the command line's options.

Options that cannot be used are to be known before a model is looked for. So little is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.engine.errors import ModelError, TidewheelError
from tidewheel.engine.files.reading import require_file
from tidewheel.engine.models.generation import read_generation_config, sampling_defaults

from ..http.limits import AdmissionLimits
from .serve import ServerOptions
from .values import api_key

if TYPE_CHECKING:
    from starlette.middleware import Middleware

    from ..telemetry.tracing import Tracer


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """What the application needs to know besides the engine.

    `chat_template` None is the tokenizer's own; `sampling_defaults` None are the engine's. Without `api_keys` none is
    asked for, without `allowed_origins` no page of another origin may read answers. `middleware` runs outermost first.
    `shown_options` are for `/server_info`.
    """

    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] = field(default=(), repr=False)
    protect_health: bool = False
    protect_metrics: bool = False
    allowed_origins: Sequence[str] = ()
    allow_credentials: bool = False
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    root_path: str = ""
    middleware: Sequence[Middleware] = ()
    request_id_headers: bool = True
    chat_template: str | None = None
    sampling_defaults: Mapping[str, float | int] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    trust_request_chat_template: bool = False
    max_stored_responses: int = 1000
    unknown_parameters: str = "refuse"
    max_body_bytes: int = 16 * 2**20
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    tracer: Tracer | None = None
    shown_options: Mapping[str, Any] = field(default_factory=dict)
    metrics_prefix: str = "tidewheel:"
    log_requests: bool = True
    log_access: bool = True
    web_ui: bool = True
    docs: bool = True


def read_app_options(options: ServerOptions, names: Sequence[str], shown_options: Mapping[str, Any]) -> AppOptions:
    """What the command line says about the application, `names` being the model's. Raises TidewheelError."""
    return AppOptions(
        served_model_names=names,
        api_keys=options.api_key + (() if options.api_key_file is None else read_key_file(options.api_key_file)),
        protect_health=options.protect_health,
        protect_metrics=options.protect_metrics,
        allowed_origins=options.allowed_origins,
        allow_credentials=options.allow_credentials,
        allowed_methods=options.allowed_methods,
        allowed_headers=options.allowed_headers,
        root_path=options.root_path or "",
        middleware=_middleware(options.middleware),
        request_id_headers=options.enable_request_id_headers,
        chat_template=_chat_template(options.chat_template),
        sampling_defaults=_sampling_defaults(options.generation_config),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        trust_request_chat_template=options.trust_request_chat_template,
        max_stored_responses=options.max_stored_responses,
        unknown_parameters=options.unknown_parameters,
        max_body_bytes=options.max_body_size,
        admission=AdmissionLimits(
            max_queue=options.max_queue,
            max_prompts=options.max_prompts,
            max_n=options.max_n,
            max_answer_bytes=options.max_answer_size,
            request_timeout_s=options.request_timeout,
        ),
        tracer=_tracer(options.otlp_traces_endpoint),
        shown_options=shown_options,
        metrics_prefix=options.metrics_prefix,
        log_requests=not options.disable_log_requests,
        log_access=not options.disable_access_log,
        web_ui=not options.disable_web_ui,
        docs=not options.disable_fastapi_docs,
    )


def read_key_file(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line, without empty lines and those that begin with #. Raises TidewheelError."""
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
        keys = tuple(api_key(line) for line in lines if line and not line.startswith("#"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TidewheelError(f"--api-key-file {path} cannot be used: {reason}") from error
    if not keys:
        raise TidewheelError(f"--api-key-file {path} has no keys in it")
    return keys


def _middleware(paths: Sequence[str]) -> Sequence[Middleware]:
    if not paths:
        return ()
    from ..http.middleware import import_middleware

    return [import_middleware(path) for path in paths]


def _tracer(endpoint: str | None) -> Tracer | None:
    if endpoint is None:
        return None
    from ..telemetry.tracing import Tracer

    return Tracer(endpoint)


def _chat_template(option: str | None) -> str | None:
    if option is None:
        return None
    from ..chat.templates import read_template_option  # with jinja, which takes a while to import

    return read_template_option(option)


def _sampling_defaults(generation_config: str) -> Mapping[str, float | int] | None:
    """What `--generation-config` says; None is the model's own defaults."""
    if generation_config == "auto":
        return None
    if generation_config == "vllm":
        return {}
    folder = Path(generation_config)
    try:
        require_file(folder / "generation_config.json")
        return sampling_defaults(read_generation_config(folder, {}))
    except ModelError as error:
        raise ModelError(f"--generation-config: {error}") from error
