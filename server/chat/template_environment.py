"""What chat templates run in: jinja2's sandbox, with what Hugging Face's templates rely on.

The process that renders requests' own templates imports this too, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_LAYOUT = 1000  # characters
_MAX_COMPLAINT = 300  # characters, of which some may be the request's


class TemplateTimeError(Exception):
    """A template takes longer than `time_limit` allows."""


_current = threading.local()  # what a thread's template may take


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """What this thread renders meanwhile may take so much processor time, or TemplateTimeError is raised. A limit
    around another one is the one that counts.
    """
    if has_time_limit():
        yield
        return
    _current.ends = time.thread_time() + seconds
    try:
        yield
    finally:
        _current.ends = None


def has_time_limit() -> bool:
    """Whether this thread is within a `time_limit`."""
    return getattr(_current, "ends", None) is not None


def _tick() -> None:
    ends = getattr(_current, "ends", None)
    if ends is not None and time.thread_time() > ends:
        raise TemplateTimeError


class ToolArguments(dict[str, Any]):
    """A call's arguments for templates of both kinds: a mapping, whose text is the JSON that the client sent."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; for serving only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    def blockvisit(self, nodes: Any, frame: Any) -> None:
        # Loops and macros have blocks: without these, a template ends soon.
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    # With `optimized=False`: or 'a' * 10**10 would fill the memory while the template is compiled.
    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


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
    if len(layout) > _MAX_LAYOUT:  # writing one of a million takes seconds, in which nothing else runs
        raise jinja2.TemplateError(f"strftime_now takes at most {_MAX_LAYOUT} characters, got {len(layout)}")
    return datetime.now().strftime(layout)


def template_environment() -> ImmutableSandboxedEnvironment:
    """A new environment. Its templates neither change their arguments nor see what is behind them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
    )
    environment.code_generator_class = _Generator
    environment.tick = _tick  # type: ignore[attr-defined]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def complaint(error: Exception) -> str:
    """What to tell a client whose messages a template did not take."""
    verb = "refused" if isinstance(error, jinja2.TemplateError) else "failed on"
    text = f"the chat template {verb} these messages: {error}"
    return text if len(text) <= _MAX_COMPLAINT else text[: _MAX_COMPLAINT - 3] + "..."
