"""The environment of chat templates: jinja2's sandbox, with what Hugging Face's templates rely on.

The process that renders requests' own templates imports this too, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..rests import Rests
from .template_bounds import Weights, bounded_filter

_MAX_LAYOUT = 1000  # characters
_MAX_COMPLAINT = 300  # characters; some may be the request's
_UNTIL_FIRST_REST_S = 0.05  # longer than anything renders on the event loop itself


class TemplateTimeError(Exception):
    """A template takes longer than `time_limit` allows."""


class _Limits(threading.local):
    """The limits of a thread's template. Values are not weighed in the process for requests' own templates, because its
    memory is bounded as a whole.
    """

    ends: float | None = None
    rests: Rests | None = None
    weights: Weights | None = None


_current = _Limits()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit what this thread renders: after `seconds` of processor time TemplateTimeError is raised, and values may not
    be too large. If limits are nested, the outer one counts.
    """
    if has_time_limit():
        yield
        return
    now = time.thread_time()
    _current.ends, _current.rests, _current.weights = now + seconds, Rests(_UNTIL_FIRST_REST_S), Weights(_tick)
    try:
        yield
    finally:
        _current.ends = _current.rests = _current.weights = None


def has_time_limit() -> bool:
    """Whether this thread is within a `time_limit`."""
    return _current.ends is not None


def _tick() -> None:
    if _current.ends is None or _current.rests is None:
        return
    now = time.thread_time()
    if now > _current.ends:
        raise TemplateTimeError
    _current.rests.if_due(now)


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


def _method_for(node: nodes.Node) -> str | None:
    """The environment's method for the node's value if no operator, filter or call has made it."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return "sliced"
    if isinstance(node, nodes.Tuple) and node.ctx != "load":
        return None
    parts = [item.value for item in node.items] if isinstance(node, nodes.Dict) else getattr(node, "items", ())
    is_new = isinstance(node, nodes.Literal) and any(not isinstance(part, nodes.Const) for part in parts)
    return "made" if is_new else None


class _Generator(CodeGenerator):
    def blockvisit(self, nodes: Any, frame: Any) -> None:
        # Loops and macros have blocks: without these, a template ends soon.
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *args: Any, **named: Any) -> None:
        if isinstance(node, nodes.Concat):
            self.write("environment.joined((")
            for part in node.nodes:
                self.visit(part, *args, **named)
                self.write(", ")
            self.write("))")
            return
        method = _method_for(node)
        self.write(f"environment.{method}(" if method else "")
        super().visit(node, *args, **named)
        self.write(")" if method else "")

    # With `optimized=False`: or 'a' * 10**10 would fill the memory while the template is compiled.
    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    """Its templates cannot change their arguments, see what is behind them, or make values that are too large."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    tick = staticmethod(_tick)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        weights = _current.weights
        return "".join(pieces) if weights is None else weights.concatenated(pieces)

    @staticmethod
    def joined(values: Sequence[Any]) -> str:
        weights = _current.weights
        return str_join(values) if weights is None else weights.joined(values)

    @staticmethod
    def made(value: Any) -> Any:
        weights = _current.weights
        return value if weights is None else weights.made(value)

    @staticmethod
    def sliced(value: Any) -> Any:
        weights = _current.weights
        return value if weights is None else weights.sliced(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        weights = _current.weights
        if weights is None:
            return super().call_binop(context, operator, left, right)
        if operator == "+" and type(left) is str and type(right) is str:
            return weights.added(left, right)
        weights.check_operation(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int | float):
            return result
        return weights.made(result, weights.weigh(left) + weights.weigh(right) if operator == "+" else None)

    def call(self, context: Context, function: Any, *args: Any, **named: Any) -> Any:
        weights = _current.weights
        is_new = weights is not None and weights.check_call(function, (*args, *named.values()))
        result = super().call(context, function, *args, **named)
        return weights.made(result) if weights is not None and is_new else result


class _Namespace(Namespace):
    """As text it does not show what is in it, which may be other ones again and again."""

    def __repr__(self) -> str:
        return "<Namespace>"


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
    if len(layout) > _MAX_LAYOUT:  # writing a million takes seconds, and nothing else runs meanwhile
        raise jinja2.TemplateError(f"strftime_now takes at most {_MAX_LAYOUT} characters, got {len(layout)}")
    return datetime.now().strftime(layout)


def template_environment() -> _Environment:
    """A new environment."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
    )
    environment.filters["tojson"] = _to_json
    for name, found in environment.filters.items():
        environment.filters[name] = bounded_filter(name, found, lambda: _current.weights)
    del environment.globals["lipsum"]  # makes any number of words
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def complaint(error: Exception) -> str:
    """What to tell a client whose messages a template did not take."""
    verb = "refused" if isinstance(error, jinja2.TemplateError) else "failed on"
    text = f"the chat template {verb} these messages: {error}"
    return text if len(text) <= _MAX_COMPLAINT else text[: _MAX_COMPLAINT - 3] + "..."
