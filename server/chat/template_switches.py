"""Variables that templates have under names of their own: for thinking or not, and for tools."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jinja2

from .template_environment import template_environment

TOOLS = ("tools", "xml_tools")
"""Where templates look for the tools. SmolLM3 has two forms of calls, and the one in tags is what parsers read."""
_THINKING = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"


def variables_in(source: str) -> frozenset[str]:
    """The names in a template that may be variables: not those that stand behind a dot."""
    try:
        tokens = [(kind, value) for _, kind, value in template_environment().lex(source) if kind != "whitespace"]
    except jinja2.TemplateError:
        return frozenset()  # which is told when it is compiled
    every = pairwise([("", ""), *tokens])
    return frozenset(value for before, (kind, value) in every if kind == "name" and before != ("operator", "."))


def switched(variables: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """The variables, and those that the template reads instead: `read` are the names in it.

    If it knows no efforts, an effort switches thinking on, and `none` off. What is given by its own name stays.
    """
    given = [variables[name] for name in _THINKING if isinstance(variables.get(name), bool)]
    if not given and isinstance(effort := variables.get(_EFFORT), str) and _EFFORT not in read:
        given = [effort != "none"]
    thinks = {name: given[0] for name in _THINKING if given and name in read}
    tools = {name: variables.get("tools") for name in TOOLS if name in read}
    return {**thinks, **tools, **variables}
