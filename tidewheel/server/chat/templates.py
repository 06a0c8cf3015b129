"""Chat templates: messages to a prompt's text, in jinja2's sandbox, as Hugging Face's tokenizers define them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidewheel.engine.errors import ModelError
from tidewheel.server.errors import bad_request


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; for serving only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's chat template, compiled once; a model may have a second one for requests with tools.

    `source` is the template, several by name (`default`, `tool_use`), or None for a model without one. Raises
    ModelError for a template that does not compile.
    """

    def __init__(self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, object]) -> None:
        by_name = {"default": source} if isinstance(source, str) else dict(source or {})
        environment = _environment()
        try:
            self._by_name = {name: environment.from_string(text) for name, text in by_name.items()}
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def with_source(self, source: str) -> ChatTemplate:
        """Another template for the same model. Raises ModelError if it does not compile."""
        return ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are the request's own (`chat_template_kwargs`).

        Raises ApiError (400) if there is no template, or with the template's own complaint.
        """
        template = (self._by_name.get("tool_use") if tools else None) or self._by_name.get("default")
        if template is None:
            raise bad_request("this model has no chat template; start the server with --chat-template", "messages")
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(context)
        except jinja2.TemplateError as error:
            raise bad_request(f"the chat template refused these messages: {error}", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
            # A template runs on the request's data, so what it trips over is the request's.
            raise bad_request(f"the chat template failed on these messages: {error}", "messages") from error


def read_template_option(value: str) -> str:
    """The template that `--chat-template` names: a file's text, or the value itself when it is a template.

    Raises ModelError for a path that cannot be read.
    """
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--chat-template {value}: {error}") from error
