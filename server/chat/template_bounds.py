"""Limits the size of values that a chat template makes.

Python makes a value of any size in one go, so a time limit does not help: a text that is doubled forty times, a list
that holds another one twice, `9 ** (9 ** 9)`. So values are weighed. Values that can be many times as large as their
parts are weighed before they are made. A text weighs its characters. A container weighs the characters of its text,
however often the same value is in it.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar

import jinja2
from jinja2.runtime import str_join

T = TypeVar("T")

MAX_WEIGHT = 1 << 25  # of one value: twice the text of the longest prompts
_MAX_TOGETHER = 1 << 26  # of all values that a rendering has at a time
_MAX_SMALL, _SMALL = 1 << 27, 256  # of all that are so small that they are not looked at again
_MAX_PRODUCT = 1 << 27  # of what one of them repeats, and how often
_MAX_BITS, _MAX_DIGITS, _WORD = 1 << 12, 300, 1 << 63
_SHORT = 1 << 12  # entries
_ENTRY = 8  # the weight of what is no text

_VIEWS: tuple[type[Iterable[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Iterable[Any]], ...] = (list, tuple, dict, set, frozenset, *_VIEWS)
_TEXTS = (str, bytes)
_GROWING = frozenset({"join", "translate", "expandtabs", "center", "ljust", "rjust", "zfill"})
_SEARCHING = frozenset({"rfind", "rindex", "rsplit", "rpartition"})  # from the end Python takes the slow way
_GROWING_FILTERS = frozenset(
    {"batch", "center", "indent", "join", "pprint", "slice", "tojson", "urlize", "wordwrap", "xmlattr"}
)
_NEW = frozenset({"copy", "dict", "fromkeys"})


class TemplateSizeError(jinja2.TemplateError):
    """A template makes more than it may."""

    def __init__(self) -> None:
        super().__init__(f"it makes values of more than {MAX_WEIGHT} characters, or many large ones")


class Weights:
    """The values that one rendering has made. All methods raise TemplateSizeError for what is too large.

    `tick` is called for each large one.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._known: dict[int, tuple[Any, int]] = {}  # by id: containers that were there before, with their weights
        self._made: dict[int, tuple[Any, int]] = {}  # and what was made
        self._total = self._total_small = 0

    def weigh(self, value: Any) -> int:
        """The weight of a value."""
        if isinstance(value, _TEXTS):
            return len(value)
        if isinstance(value, int):
            return _ENTRY if -_WORD < value < _WORD else _ENTRY + value.bit_length() // 3
        if not isinstance(value, _CONTAINERS):
            return _ENTRY
        known = self._made.get(id(value)) or self._known.get(id(value))
        if known is not None:
            return known[1]
        weight = _ENTRY + sum(map(self.weigh, value))
        if isinstance(value, dict):
            weight += sum(map(self.weigh, value.values()))
        if weight >= _SMALL:
            self._known[id(value)] = value, weight
        return weight

    def made(self, value: T, weight: int | None = None) -> T:
        """The value, which counts from now on for as long as it is used."""
        if weight is None:
            weight = self.weigh(value)
        if weight < _SMALL:
            self._total_small += weight
            if self._total_small > _MAX_SMALL:
                raise TemplateSizeError
            return value
        _require(weight)
        self._tick()
        if id(value) not in self._made:
            self._known.pop(id(value), None)
            self._made[id(value)] = value, weight
            self._total += weight
            if self._total > 2 * _MAX_TOGETHER:
                self._forget()
        return value

    def sliced(self, value: T) -> T:
        """A part of a text or a list: short ones, which many templates have, are not looked through."""
        if isinstance(value, list | tuple) and len(value) < _SHORT:
            self._total_small += _ENTRY * len(value)
            return value
        return self.made(value)

    def concatenated(self, pieces: Iterable[str]) -> str:
        """The pieces as one text."""
        found, length = list[str](), 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_WEIGHT:
                raise TemplateSizeError
            found.append(piece)
        return self.made("".join(found), length)

    def added(self, left: str, right: str) -> str:
        """The sum of two texts; `+` is what templates use most."""
        weight = len(left) + len(right)
        if weight >= _SMALL or self._total_small > _MAX_SMALL:
            _require(weight)
            return self.made(left + right, weight)
        self._total_small += weight
        return left + right

    def joined(self, values: Sequence[Any]) -> str:
        """What `~` makes."""
        _require(sum(map(self.weigh, values)))
        return self.made(str_join(values))

    def check_operation(self, operator: str, left: Any, right: Any) -> None:
        """Look at both sides of `+`, `*`, `**` or `%` before it is done."""
        if operator == "%":
            if isinstance(left, _TEXTS):
                self._check_format(left, left.count("%" if isinstance(left, str) else b"%"), right)  # type: ignore[arg-type]
        elif isinstance(left, int) and isinstance(right, int):
            bits, times = left.bit_length(), right.bit_length() if operator == "*" else right
            if operator == "**" and bits > 1 and bits * times > _MAX_BITS:
                raise TemplateSizeError
            if operator == "*" and bits + times > _MAX_BITS:
                raise TemplateSizeError
        elif operator == "*":
            for values, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _require(self.weigh(values) * times)
        elif operator == "+":
            _require(self.weigh(left) + self.weigh(right))

    def check_call(self, function: Any, values: Sequence[Any]) -> bool:
        """Look at what is called before it is done. Returns whether it makes something new."""
        function = getattr(function, "__wrapped__", function)  # so the sandbox has str.format
        receiver, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        if isinstance(receiver, _TEXTS):
            if name in ("format", "format_map"):
                self._check_braces(receiver, values)  # type: ignore[arg-type]
            elif name == "replace" and len(values) > 1:
                self._check_replace(receiver, *values[:2])
            elif name in _GROWING:
                self.check_product(receiver, values)
            elif name in _SEARCHING and self.weigh(receiver) * sum(map(self.weigh, values)) > 8 * _MAX_PRODUCT:
                raise TemplateSizeError
            return True
        if isinstance(receiver, int):
            self.check_product("", values)
        return name in _NEW

    def check_filter(self, name: str, values: Sequence[Any]) -> None:
        """The same for a filter. The first value is the one that it is used on."""
        first, more = values[0] if values else "", values[1:]
        if name == "format":
            self._check_format(str(first), str(first).count("%"), more)
        elif name == "replace" and len(more) > 1:
            self._check_replace(str(first), *more[:2])
        elif name == "sum" and any(isinstance(value, _CONTAINERS) for value in more):
            raise TemplateSizeError  # each sum is a new list
        elif name == "round" and any(isinstance(value, int) and value > _MAX_DIGITS for value in more):
            raise TemplateSizeError  # it computes that power of ten
        elif name in _GROWING_FILTERS:
            self.check_product(first, more or (_ENTRY,))

    def check_product(self, value: Any, others: Sequence[Any]) -> None:
        """Check what may repeat each of `others`, or do something that many times, at each place of the value."""
        times = 1
        for other in others:
            times = max(times, abs(other) if isinstance(other, int) else self.weigh(other))
        if times > 1 and (self.weigh(value) + 1) * times > _MAX_PRODUCT:
            raise TemplateSizeError

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        if type(old) is type(new) and isinstance(old, _TEXTS):
            _require(len(text) + text.count(old) * len(new))

    def _check_format(self, text: str | bytes, fields: int, values: Any) -> None:
        layout = text if isinstance(text, str) else text.decode("latin-1")
        if "*" in layout or fields * self.weigh(values) > _MAX_PRODUCT:
            raise TemplateSizeError
        _require_widths(layout)

    def _check_braces(self, text: str, values: Sequence[Any]) -> None:
        layouts = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
        if any("{" in layout for layout in layouts) or text.count("{") * self.weigh([*values]) > _MAX_PRODUCT:
            raise TemplateSizeError
        _require_widths(" ".join(layouts))

    def _forget(self) -> None:
        """Forget what is used no more: containers before what is in them."""
        for key, (value, weight) in reversed([*self._made.items()]):
            # `_made` and the list have the tuple of it; this loop and the call have the value itself.
            if sys.getrefcount(value) <= _OWN_REFERENCES:
                del self._made[key]
                self._total -= weight
        if self._total > _MAX_TOGETHER:
            raise TemplateSizeError


_OWN_REFERENCES, _LONGEST_WIDTH = 3, 8


def _require(weight: int) -> None:
    if weight > MAX_WEIGHT:
        raise TemplateSizeError


def _require_widths(layout: str) -> None:
    widths = re.findall(r"\d+", layout)
    _require(sum(int(width) if len(width) < _LONGEST_WIDTH else MAX_WEIGHT + 1 for width in widths))


def bounded_filter(name: str, filter: Callable[..., Any], current: Callable[[], Weights | None]) -> Callable[..., Any]:
    """A filter whose values `current` weighs, if it is not None."""
    skipped = hasattr(filter, "jinja_pass_arg")  # its first argument is the context

    @wraps(filter)
    def bounded(*args: Any, **named: Any) -> Any:
        weights = current()
        if weights is None:
            return filter(*args, **named)
        weights.check_filter(name, (*args[skipped:], *named.values()))
        return weights.made(filter(*args, **named))

    return bounded
