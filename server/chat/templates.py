"""Chat templates: messages to a prompt's text, as Hugging Face's tokenizers define them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.wording import one_line, reason

from ..errors import bad_request
from .harmony import is_harmony
from .template_environment import TemplateTimeError, complaint, has_time_limit, template_environment, time_limit
from .template_reading import TemplateReading, read_template
from .template_switches import read_switches

# A template runs on the request's data, so what it trips over is the request's.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    ArithmeticError,
    LookupError,
    RecursionError,
)
_MAX_S = 5.0
_RENDERED = ("default", "tool_use")  # others are not compiled: a file may have thousands


class ChatTemplate:
    """A model's chat template, compiled once; a model may have a second one for requests with tools.

    `source` is the template, several by name (`default`, `tool_use`), or None for a model without one. Raises
    ModelError for a template that does not compile.
    """

    def __init__(self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, object]) -> None:
        by_name = {"default": source} if isinstance(source, str) else dict(source or {})
        environment = template_environment()
        try:
            self._by_name = {name: environment.from_string(by_name[name]) for name in _RENDERED if name in by_name}
        except Exception as error:  # jinja2's own, and any from Python's compiler for the resulting code
            raise ModelError(f"the chat template does not compile: {one_line(error)}") from error
        self._readings = {name: read_template(by_name[name]) for name in self._by_name}
        self._special_tokens = dict(special_tokens)
        self.is_harmony = any(map(is_harmony, by_name.values()))
        """Whether prompts are written in the harmony format."""
        self._switches = read_switches(by_name[name] for name in self._by_name)

    def context(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """All variables of a template for this model. `variables` are the request's own (`chat_template_kwargs`)."""
        return {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt's text; `options` are those of `context`.

        Raises ApiError (400) if there is no template, if it takes too long, or with the template's own complaint.
        Within a `time_limit`, TemplateTimeError is raised after that.
        """
        template = self._by_name.get(self._name(tools))
        if template is None:
            raise bad_request("this model has no chat template; start the server with --chat-template", "messages")
        within = has_time_limit()
        try:
            with time_limit(_MAX_S):
                return template.render(self._switches.switched(self.context(messages, tools, **options)))
        except TemplateTimeError:
            if within:
                raise
            message = f"the chat template takes more than {_MAX_S:g} s of processor time for these messages"
            raise bad_request(message, "messages") from None
        except _FAILURES as error:
            raise bad_request(complaint(error), "messages") from error

    def reading(self, has_tools: bool) -> TemplateReading:
        """How the template for requests with tools, or without, wants messages."""
        return self._readings.get(self._name(has_tools), TemplateReading())

    def _name(self, has_tools: object) -> str:
        return "tool_use" if has_tools and "tool_use" in self._by_name else "default"


def read_template_option(value: str) -> str:
    """The template that `--chat-template` names: a file's text, or the value itself when it is a template.

    Raises ModelError for a path that cannot be read.
    """
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"--chat-template: there is no file {value}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"--chat-template {value} cannot be read: {reason(error)}") from error
