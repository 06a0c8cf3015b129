"""EngineArgs: the arguments of an LLM as an object, and as flags of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from tidewheel.server.options.parser import add_option

from .not_there import NamesOfVllm
from .options import OFFLINE_OPTIONS, OfflineOptions, no_such_option, offline_options
from .vllm_arguments import vllm_arguments

T = TypeVar("T")

_OF_VLLM: Mapping[str, int] = vllm_arguments(OFFLINE_OPTIONS)
_PARSER = TypeVar("_PARSER", bound=argparse.ArgumentParser)


def _with_a_field_for_each_argument(kind: type[T]) -> type[T]:
    names = dict.fromkeys(["model", *OFFLINE_OPTIONS, *_OF_VLLM])
    kind.__annotations__ = dict.fromkeys(names, Any)
    for name in names:
        setattr(kind, name, None)
    return dataclass(init=False, repr=False)(kind)


@_with_a_field_for_each_argument
class EngineArgs(NamesOfVllm):
    """The arguments of LLM and AsyncLLM: a dataclass with a field for each, None for what was not given.

    What vLLM has and is not supported here is refused where the model is loaded, with all that is wrong. Raises
    TypeError for an argument that does not exist.
    """

    def __init__(self, model: str | None = None, **given: Any) -> None:
        known = {field.name for field in fields(type(self))}  # type: ignore[arg-type] # the decorator makes it one
        for name, value in {"model": model, **given}.items():
            if name not in known:
                raise no_such_option(type(self).__name__, name)
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def given(self) -> dict[str, Any]:
        """The arguments that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def options(self, **others: Any) -> OfflineOptions:
        """The options of these and other arguments of LLM. Raises TypeError and OptionError as LLM does."""
        given = {**self.given(), **others}
        return offline_options(given.pop("model", None), given.pop("runner", None), given)

    @staticmethod
    def add_cli_args(parser: _PARSER) -> _PARSER:
        """Give a parser a flag for each argument, except flags that it has already. Returns the parser.

        After parsing, an argument that was not given is None. --help shows those that have an effect.
        """
        group = parser.add_argument_group("engine")
        taken = parser._option_string_actions  # of its groups, too
        added = []
        for name, option in OFFLINE_OPTIONS.items():
            if option.flag not in taken:
                add_option(group, option)
                added.append(name)
        for name, takes in _OF_VLLM.items():
            flag = "--" + name.replace("_", "-")
            if flag in taken:
                continue
            if not takes:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
            else:
                group.add_argument(flag, nargs=None if takes == 1 else "*", help=argparse.SUPPRESS)
            added.append(name)
        parser.set_defaults(**dict.fromkeys(added))
        return parser

    @classmethod
    def from_cli_args(cls: type[T], args: argparse.Namespace) -> T:
        """The arguments of a command line that a parser with `add_cli_args` has read."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


class AsyncEngineArgs(EngineArgs):
    """EngineArgs under vLLM's name for the arguments of an AsyncLLM."""
