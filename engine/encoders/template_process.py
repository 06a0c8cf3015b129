"""The process that renders a reranker's chat template. Its time and memory are limited: files are not trusted."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..machine.memory import limit_address_space

_MAX_MEMORY_BYTES = 512 * 2**20
_MAX_TEXT = 2**16  # characters
_MAX_COMPLAINT = 300


def main() -> None:
    """Read a template, its variables and a limit of seconds from stdin. Write the text or a complaint to stdout."""
    request = json.load(sys.stdin)
    limit_address_space(_MAX_MEMORY_BYTES)
    for limit, value in (
        (resource.RLIMIT_CPU, request["seconds"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    try:
        answer = {"text": _rendered(request["template"], request["variables"])}
    except Exception as error:  # whatever the template does wrong
        answer = {"error": (str(error) or type(error).__name__)[:_MAX_COMPLAINT]}
    json.dump(answer, sys.stdout)


def _rendered(template: str, variables: Mapping[str, Any]) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _fail
    text = ""
    for piece in environment.from_string(template).generate(variables):
        text += piece
        if len(text) > _MAX_TEXT:
            raise ValueError(f"it writes more than {_MAX_TEXT} characters")
    return text


def _fail(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
