"""What the application needs to know besides the engine, and reading it from the command line's options.

Options that cannot be used are to be known before a model is looked for. So little is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewheel.engine.errors import ModelError
from tidewheel.server.options import ServerOptions

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """What the application needs to know besides the engine.

    `chat_template` None is the tokenizer's own; `sampling_defaults` None are the engine's.
    """

    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] = field(default=(), repr=False)
    chat_template: str | None = None
    sampling_defaults: Mapping[str, float | int] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    trust_request_chat_template: bool = False
    max_body_bytes: int = 32 * 2**20
    log_requests: bool = True
    web_ui: bool = True
    docs: bool = True


def read_app_options(options: ServerOptions, names: Sequence[str]) -> AppOptions:
    """What the command line says about the application, `names` being the model's. Raises TidewheelError."""
    return AppOptions(
        served_model_names=names,
        api_keys=options.api_key,
        chat_template=_chat_template(options.chat_template),
        sampling_defaults=_sampling_defaults(options.generation_config),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        default_chat_template_kwargs=options.default_chat_template_kwargs,
        trust_request_chat_template=options.trust_request_chat_template,
        max_body_bytes=options.max_body_size,
        log_requests=not options.disable_log_requests,
        web_ui=not options.disable_web_ui,
        docs=not options.disable_fastapi_docs,
    )


def _chat_template(option: str | None) -> str | None:
    if option is None:
        return None
    from tidewheel.server.chat.templates import read_template_option  # with jinja, which takes a while to import

    return read_template_option(option)


def _sampling_defaults(generation_config: str) -> Mapping[str, float | int] | None:
    """What `--generation-config` says; None is the model's own defaults."""
    if generation_config == "auto":
        return None
    if generation_config == "vllm":
        return {}
    path = Path(generation_config) / "generation_config.json"
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"--generation-config {generation_config}: {path.name} cannot be read: {error}") from error
    return {name: config[name] for name in _SAMPLING_DEFAULTS if isinstance(config.get(name), int | float)}
