"""Dataclasses as command lines: a field declared with `option` is a flag and an environment variable.

A value comes from the command line, else from the environment variable `TIDEWHEEL_<FLAG>` (`--max-model-len` is
`TIDEWHEEL_MAX_MODEL_LEN`; lists are separated by spaces, switches are 1 or 0), else from one of the option's aliases,
else it is the default.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .values import switch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ENV_PREFIX = "TIDEWHEEL_"

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")


def option(
    default: Any,
    help_text: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    env_aliases: Sequence[str] = (),
    flag_aliases: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that is an option. A bool is a switch, a tuple takes several values.

    A `secret` one is never shown. `parse` may give a list for one of several values, which is then spread out.
    """
    metadata = {
        "secret": secret,
        "help": help_text,
        "parse": parse,
        "choices": choices,
        "metavar": metavar,
        "env_aliases": tuple(env_aliases),
        "flag_aliases": tuple(flag_aliases),
    }
    return field(default=default, metadata=metadata)


class OptionError(Exception):
    """A command line or an environment that cannot be used."""


class OptionParser(argparse.ArgumentParser):
    """An argparse parser that suggests the closest option for one that does not exist."""

    def parse_known(self, arguments: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = self.parse_known_args(list(arguments))
        if unknown:
            name = unknown[0].split("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, 1)
            hint = f"; did you mean {close[0]}?" if close and name.startswith("-") else ""
            what = "option" if name.startswith("-") else "argument"
            self.error(f"unknown {what} {name}{hint} (see --help)")
        return namespace

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def flag(name: str) -> str:
    """A field's name as a flag."""
    return "--" + name.replace("_", "-")


def add_options(group: argparse._ArgumentGroup, group_type: type[DataclassInstance]) -> None:
    """Give a parser's group every option of a dataclass."""
    for spec in fields(group_type):
        _add_option(group, spec.name, spec.default, spec.metadata)


def _add_option(group: argparse._ArgumentGroup, name: str, default: Any, metadata: Mapping[str, Any]) -> None:
    flags = [flag(name), *metadata["flag_aliases"]]
    help_text = metadata["help"]
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        help_text += f" [{default}]"
    for alias in metadata["env_aliases"]:
        help_text += f" (also ${alias})"
    shared: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text.replace("%", "%%")}
    if isinstance(default, bool):
        action: Any = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(*flags, action=action, **shared)
        return
    shared["type"] = argument_type(metadata["parse"])
    shared["choices"] = metadata["choices"]
    shared["metavar"] = metadata["metavar"]
    if isinstance(default, tuple):
        group.add_argument(*flags, nargs="+", action="extend", **shared)
    else:
        group.add_argument(*flags, **shared)


def argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as an argparse type whose ValueError's own words reach the user."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def build_options(group_type: type[OptionsT], given: Mapping[str, Any], environment: Mapping[str, str]) -> OptionsT:
    """The options of one dataclass from what was parsed and an environment. Raises OptionError."""
    values: dict[str, Any] = {}
    for spec in fields(group_type):
        if spec.name in given:
            value = given[spec.name]
            values[spec.name] = _spread(value) if isinstance(spec.default, tuple) else value
            continue
        for variable in (ENV_PREFIX + spec.name.upper(), *spec.metadata["env_aliases"]):
            if environment.get(variable):
                values[spec.name] = _from_environment(variable, environment[variable], spec.default, spec.metadata)
                break
    return group_type(**values)


def _spread(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(item for value in values for item in (value if isinstance(value, list) else [value]))


def _from_environment(variable: str, text: str, default: Any, metadata: Mapping[str, Any]) -> Any:
    try:
        if isinstance(default, bool):
            return switch(text)
        if isinstance(default, tuple):
            return _spread(metadata["parse"](item) for item in ([text] if text.startswith("[") else text.split()))
        value = metadata["parse"](text)
    except ValueError as error:
        raise OptionError(f"${variable}: {error}") from None
    choices = metadata["choices"]
    if choices is not None and value not in choices:
        raise OptionError(f"${variable}: must be one of {', '.join(choices)}, got {text!r}")
    return value
