"""Variables that templates have under names of their own: for thinking or not, how much of it, and for tools.

What a template compares an effort with tells which ones it knows. It is read, not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes

from .template_environment import template_environment
from .template_reading import every_node

TOOLS = ("tools", "xml_tools")
"""Where templates look for the tools. SmolLM3 has two forms of calls, and the one in tags is what parsers read."""
_THINKING = ("enable_thinking", "thinking")
_EFFORT, _MODE, _BUDGET = "reasoning_effort", "thinking_mode", "thinking_budget"
_EFFORTS = (_EFFORT, "thinking_effort", "reasoning_strength")
_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
_OFF = ("none", "no_think", "off", "disabled")
_MODES = (("enabled", "disabled"), ("thinking", "chat"), ("think", "no_think"), ("on", "off"))
_BUDGETS = {"minimal": 512, "low": 1024, "medium": 4096, "high": 16384}  # Seed-OSS's steps; above: no limit
_FLAGS = {"low_effort": ("minimal", "low"), "medium_effort": ("medium",)}
_CLEANING_FILTERS = ("default", "d", "lower", "string", "trim")
_CLEANING_METHODS = ("lower", "strip")
_MAX_PASSES = 4  # over assignments


class Values(NamedTuple):
    """The values that a template compares a variable with: those that it `knows`, and the `only` ones that it takes."""

    knows: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()

    def nearest(self, effort: str) -> str | None:
        """The value for an effort; None if there is none."""
        values = self.only or self.knows
        if effort == "none":
            return next((word for word in _OFF if word in values), None if self.only else effort)
        ranks = [rank for rank, level in enumerate(_LEVELS) if level in values]
        if effort in values or effort not in _LEVELS or not ranks:
            return effort
        rank = _LEVELS.index(effort)
        # A template may name a few efforts at one end alone, and mean the others where it names none.
        is_among = ranks[0] < rank < ranks[-1] or rank < ranks[0] <= 1 or rank > ranks[-1] >= 3
        if not (self.only or is_among):
            return effort
        return _LEVELS[min(ranks, key=lambda other: (abs(other - rank), -other))]

    def lowest(self) -> str | None:
        """The lowest effort, where the template takes no others than it names."""
        return next((level for level in _LEVELS if level in self.only), None)


class Switches(NamedTuple):
    """What a template reads: the names in it, and the values that it compares some of its variables with."""

    read: frozenset[str] = frozenset()
    values: Mapping[str, Values] = {}

    def switched(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The variables, and those that the template reads instead.

        An effort switches thinking on, and `none` off. It becomes the nearest one that the template knows. What is
        given by another name of the template's stays.
        """
        effort = variables.get(_EFFORT)
        given = [variables[name] for name in _THINKING if isinstance(variables.get(name), bool)]
        if not given and isinstance(effort, str):
            given = [effort != "none"]
        made = self._switched(given[0]) if given else {}
        rest = dict(variables)
        if isinstance(effort, str):
            made |= {name: effort in levels for name, levels in _FLAGS.items() if name in self.read}
            if _BUDGET in self.read and self.read.isdisjoint(_EFFORTS) and given[0] and effort in _BUDGETS:
                made[_BUDGET] = _BUDGETS[effort]
            made |= self._efforts(effort, can_leave_out=bool(made))
            if _EFFORT in self.read:
                del rest[_EFFORT]
        tools = {name: variables.get("tools") for name in TOOLS if name in self.read}
        return {**made, **tools, **rest}

    def _switched(self, on: bool) -> dict[str, Any]:
        made: dict[str, Any] = {name: on for name in _THINKING if name in self.read}
        modes = self.values.get(_MODE, Values())
        pair = next((pair for pair in _MODES if not (modes.knows | modes.only).isdisjoint(pair)), None)
        if pair is not None:
            made[_MODE] = pair[0] if on else pair[1]
        if not on and _BUDGET in self.read:
            made[_BUDGET] = 0
        return made

    def _efforts(self, effort: str, *, can_leave_out: bool) -> dict[str, str]:
        made = {}
        for name in _EFFORTS:
            values = self.values.get(name, Values())
            value = values.nearest(effort)
            if value is None and not can_leave_out:
                value = values.lowest()
            if name in self.read and value is not None:
                made[name] = value
        return made


def read_switches(sources: Iterable[str]) -> Switches:
    """What templates read, all together."""
    read, values = frozenset[str](), dict[str, Values]()
    for source in sources:
        read |= variables_in(source)
        every = every_node(source)
        for name in (*_EFFORTS, _MODE):
            found, before = _values_of(name, every), values.get(name, Values())
            values[name] = Values(before.knows | found.knows, before.only | found.only)
    return Switches(read, values)


def variables_in(source: str) -> frozenset[str]:
    """The names in a template that may be variables: not those that stand behind a dot."""
    try:
        tokens = [(kind, value) for _, kind, value in template_environment().lex(source) if kind != "whitespace"]
    except jinja2.TemplateError:
        return frozenset()  # compiling it reports that
    every = pairwise([("", ""), *tokens])
    return frozenset(value for before, (kind, value) in every if kind == "name" and before != ("operator", "."))


def _values_of(variable: str, every: list[nodes.Node]) -> Values:
    """The values that a template's nodes compare a variable with, or another variable with its value."""
    names = {variable}
    lists: dict[str, frozenset[str]] = {}
    for _ in range(_MAX_PASSES):
        before = len(names)
        for node in every:
            if not isinstance(node, nodes.Assign) or (target := _name(node.target)) is None:
                continue
            if texts := _texts(node.node):
                lists[target] = texts
            elif any(_name(part) in names for part in _alternatives(node.node)):
                names.add(target)
        if len(names) == before:
            break
    knows, only = set[str](), set[str]()
    for node in every:
        if not isinstance(node, nodes.Compare) or len(node.ops) != 1:
            continue
        operand = node.ops[0]
        left, right = (node.expr, operand.expr) if _name(node.expr) in names else (operand.expr, node.expr)
        if _name(left) not in names:
            continue
        texts = _texts(right) or lists.get(_name(right) or "", frozenset())
        if operand.op == "notin":
            only |= texts
        elif operand.op in ("eq", "ne", "in"):
            knows |= texts
    return Values(frozenset(knows), frozenset(only))


def _alternatives(node: nodes.Node) -> list[nodes.Node]:
    """The expressions, one of which gives `node` its value."""
    if isinstance(node, nodes.CondExpr):
        return [node.expr1, *([] if node.expr2 is None else [node.expr2])]
    return [node.left, node.right] if isinstance(node, nodes.Or) else [node]


def _name(node: nodes.Node) -> str | None:
    """The variable that an expression is, perhaps in lower case or without white space."""
    while True:
        called = node.node if isinstance(node, nodes.Call) else None
        if isinstance(node, nodes.Filter) and node.name in _CLEANING_FILTERS and node.node is not None:
            node = node.node
        elif isinstance(called, nodes.Getattr) and called.attr in _CLEANING_METHODS:
            node = called.node
        elif isinstance(node, nodes.NSRef):
            return f"{node.name}.{node.attr}"
        elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            return f"{node.node.name}.{node.attr}"
        else:
            return node.name if isinstance(node, nodes.Name) else None


def _texts(node: nodes.Node) -> frozenset[str]:
    """The texts of a constant, or of a list, or the keys of a dict."""
    if isinstance(node, nodes.Dict):
        items: list[nodes.Node] = [pair.key for pair in node.items]
    else:
        items = [*node.items] if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return frozenset(item.value for item in items if isinstance(item, nodes.Const) and isinstance(item.value, str))
