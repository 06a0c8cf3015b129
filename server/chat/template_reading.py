"""Finds out what a chat template reads: contents as texts or as lists of parts, and its name for reasoning.

Templates are not run: jinja2's own tree of a template tells what it loops over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jinja2
from jinja2 import nodes

from .template_environment import template_environment

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thoughts", "tool_plan")
_CHOOSING_FILTERS = frozenset({"selectattr", "rejectattr", "select", "reject", "list", "map"})
_MAX_PASSES = 8  # over assignments: each finds the names of one more step
_MAX_CHARACTERS = 2**20


class TemplateReading(NamedTuple):
    """How a template wants a message.

    `parts`: contents are lists of parts, never texts. `reasoning` is the field that has an assistant's reasoning. With
    `thinking_parts` it is a part of the content instead, with `thought_blocks` a block of it.
    """

    parts: bool = False
    reasoning: str = "reasoning_content"
    thinking_parts: bool = False
    thought_blocks: bool = False


def read_template(source: str) -> TemplateReading:
    """How the template `source` wants messages: a template that tests for a text takes texts."""
    every = every_node(source)
    contents = _Contents(every)
    read = {name for node in every if (name := _member(node)) is not None}
    kinds = {
        value.value
        for node in every
        if isinstance(node, nodes.Compare) and _member(node.expr) == "type"
        for operand in node.ops
        if isinstance(value := operand.expr, nodes.Const)
    }
    field = next((name for name in _REASONING_FIELDS if name in read), "reasoning_content")
    has_field = field in read and not (field == "thinking" and "thinking" in kinds)
    return TemplateReading(
        parts=contents.are_parts,
        reasoning=field,
        thinking_parts="thinking" in kinds and not has_field,
        thought_blocks={"thoughts", "response"} <= kinds and "blocks" in read and not has_field,
    )


def every_node(source: str) -> list[nodes.Node]:
    """All nodes of a template; none if it is very long or does not compile, which compiling it reports."""
    try:
        return list(_descendants(template_environment().parse(source))) if len(source) <= _MAX_CHARACTERS else []
    except (jinja2.TemplateError, RecursionError):
        return []


class _Contents:
    """The expressions of a template that are a message's content, and what it does with them."""

    def __init__(self, every: list[nodes.Node]) -> None:
        self._names = {"content"}
        macros = {node.name: [arg.name for arg in node.args] for node in every if isinstance(node, nodes.Macro)}
        for _ in range(_MAX_PASSES):
            before = len(self._names)
            for node in every:
                if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and self._is(node.node):
                    self._names.add(node.target.name)
                elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
                    given = zip(macros.get(node.node.name, ()), node.args, strict=False)
                    self._names.update(name for name, value in given if self._is(value))
            if len(self._names) == before:
                break
        tests = any(isinstance(node, nodes.Test) and node.name == "string" and self._is(node.node) for node in every)
        self.are_parts = not tests and any(map(self._takes_apart, every))

    def _takes_apart(self, node: nodes.Node) -> bool:
        """Whether a node reads parts of a content: a loop, a choice by an attribute, or one by its index."""
        if isinstance(node, nodes.For):
            return self._is(node.iter)
        if isinstance(node, nodes.Filter) and node.name in ("selectattr", "rejectattr"):
            return node.node is not None and self._is(node.node)
        if _member(node) is None or not isinstance(node, nodes.Getattr | nodes.Getitem):
            return False
        part = node.node
        return (
            isinstance(part, nodes.Getitem)
            and isinstance(part.arg, nodes.Const)
            and isinstance(part.arg.value, int)
            and self._is(part.node)
        )

    def _is(self, node: nodes.Node) -> bool:
        while (inner := _whole(node)) is not None:
            node = inner
        return _member(node) == "content" or (isinstance(node, nodes.Name) and node.name in self._names)


def _whole(node: nodes.Node) -> nodes.Node | None:
    """The value that `node` chooses parts of, if it does."""
    if isinstance(node, nodes.Filter):
        return node.node if node.name in _CHOOSING_FILTERS else None
    if isinstance(node, nodes.Getitem):
        return node.node if isinstance(node.arg, nodes.Slice) else None
    return node.left if isinstance(node, nodes.Or) else None


def _member(node: nodes.Node) -> str | None:
    """The name of the member that `node` reads: `a.name`, `a['name']` or `a.get('name')`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get" and node.args:
        name = node.args[0]
        return name.value if isinstance(name, nodes.Const) and isinstance(name.value, str) else None
    return None


def _descendants(tree: nodes.Node) -> Iterator[nodes.Node]:
    """All nodes below `tree`, without recursion: templates may be nested deeply."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left.extend(node.iter_child_nodes())
