"""Declared options as a command line: each is a flag and an environment variable.

A value comes from the command line, else from the environment variable `TIDEWHEEL_<FLAG>` (`--max-model-len` is
`TIDEWHEEL_MAX_MODEL_LEN`; lists are separated by spaces, switches are 1 or 0), else from one of the option's aliases,
else it is the default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import Option, Options, OptionsT, options_of
from tidewheel.engine.declaring.values import switch

from .hints import hint
from .spelling import is_flag, spelled

T = TypeVar("T")


class OptionParser(argparse.ArgumentParser):
    """An argparse parser that knows vLLM's spellings, and finds all that is wrong with a line, not the first of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exit_on_error=False, **settings)
        self._found = Mistakes()

    @property
    def flags(self) -> Collection[str]:
        """All flags that there are, under all their names."""
        return self._option_string_actions

    def parse_known(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What was given, by name. If there is more than the parser knows, prints what is wrong and exits with 2."""
        mistakes = Mistakes()
        parsed = self.read(arguments, mistakes)
        self.refuse(mistakes)
        return parsed

    def read(self, arguments: Sequence[str], mistakes: Mistakes) -> dict[str, Any]:
        """What was given, by name. `mistakes` gets what is wrong. With --help, prints that and exits."""
        self._found = mistakes
        line = spelled(arguments)
        for argument in line:
            name, _, wanted = argument.partition("=")
            if name in ("-h", "--help"):
                self._print_help_of(wanted)
                self.exit()
        for argument in [argument for argument in line if self._is_switch_with_value(argument)]:
            name = argument.partition("=")[0].removeprefix("--").removeprefix("no-")
            mistakes.add(f"--{name} takes no value: use --{name} or --no-{name}, got {argument!r}")
            line.remove(argument)
        unknown = [*self._unknown(line)]
        if unknown:
            hinted = ", ".join(flag + hint(flag, self.flags) for flag in unknown)
            mistakes.add(f"unknown option{'s' * (len(unknown) > 1)} {hinted}; see --help")
        line = _without(line, unknown)
        while True:
            try:
                namespace, rest = self.parse_known_args(line)
            except argparse.ArgumentError as error:
                mistakes.add(str(error))
                shorter = _without(line, (error.argument_name or "").split("/"))
                if shorter == line:  # it is about no flag
                    return {}
                line = shorter
            else:
                break
        if rest:
            mistakes.add(f"unknown argument {rest[0]}; see --help")
        return vars(namespace)

    def refuse(self, mistakes: Mistakes) -> None:
        """Prints all mistakes and exits with 2, if there are any."""
        if mistakes.sentences:
            self.exit(2, f"{self.prog}: {mistakes}\n")

    def _print_help_of(self, wanted: str) -> None:
        """All of it, or as vLLM has it: `listgroup`, a group by its name, or the options with a word in their names."""
        if wanted.lower() in ("", "all", "page"):
            self.print_help()
            return
        groups = {str(group.title): group._group_actions for group in self._action_groups}
        if wanted.lower() == "listgroup":
            print("\n".join(title for title, actions in groups.items() if actions))
            return
        # Groups of vLLM's are called ModelConfig, Frontend and so on.
        word = wanted.lower().lstrip("-").replace("_", "-").removesuffix("config")
        actions = groups.get("server" if word == "frontend" else word) or [
            action for action in self._actions if any(word in flag for flag in action.option_strings)
        ]
        if not actions:
            self.exit(2, f"{self.prog}: no option has {wanted!r} in its name; --help shows all of them\n")
        formatter = self._get_formatter()
        formatter.add_arguments(actions)
        print(formatter.format_help(), end="")

    def _is_switch_with_value(self, argument: str) -> bool:
        flag, equals, _ = argument.partition("=")
        switch = self._option_string_actions.get(flag)
        return bool(equals) and switch is not None and switch.nargs == 0

    def _unknown(self, line: Sequence[str]) -> list[str]:
        unknown = []
        for before, argument in zip(["", *line], line, strict=False):
            flag = argument.partition("=")[0]
            # What stands in the place of a value is not repeated: it may be a secret.
            owner = self._option_string_actions.get(before)
            if is_flag(flag) and flag not in self.flags and (owner is None or owner.nargs == 0):
                unknown.append(flag)
        return [*dict.fromkeys(unknown)]

    def error(self, message: str) -> NoReturn:
        self._found.add(message)
        self.exit(2, f"{self.prog}: {self._found}\n")


def add_option(group: argparse._ArgumentGroup, option: Option, remark: str = "", *, action: str = "store") -> None:
    """Give a parser's group a declared option; `remark` follows its help. What is not given is not in the namespace.

    `action` is argparse's, for an option with one value.
    """
    declared, default = option.declaration, option.default
    help_text = declared.help + remark
    if option.takes_several and default:
        help_text += f" [{' '.join(default)}]"
    elif isinstance(default, str | int | float) and not option.is_switch:
        help_text += f" [{default}]"
    for alias in declared.env_aliases:
        help_text += f" (also ${alias})"
    flags = [option.flag, *declared.flag_aliases]
    shared: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help_text.replace("%", "%%")}
    if option.is_switch:
        switch_action: Any = argparse.BooleanOptionalAction if option.given_default else "store_true"
        group.add_argument(*flags, action=switch_action, **shared)
        if not option.given_default:  # as all of vLLM's switches
            off = {**shared, "help": argparse.SUPPRESS}
            opposites = (flag.replace("--", "--no-", 1) for flag in flags if not flag.startswith("--no-"))
            group.add_argument(*opposites, action="store_false", **off)
        return
    shared |= {"type": argument_type(option.read), "choices": declared.choices, "metavar": declared.metavar}
    if option.takes_several:
        shared |= {"nargs": "+"}
        action = "extend"
    group.add_argument(*flags, action=action, **shared)


def in_order_of_help(owners: Iterable[type[Options]], runs: Sequence[str]) -> list[Option]:
    """All options of the owners. --help goes by topic, from one owner's options to another's and back.

    `runs` names options, the first one of the first owner among them: with each, a run of its owner's options begins.
    """
    by_start: dict[str, list[Option]] = {}
    for owner in owners:
        for option in options_of(owner):
            if option.name in runs:
                run = by_start[option.name] = []
            run.append(option)
    return [option for name in runs for option in by_start[name]]


def argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as an argparse type whose ValueError's own words reach the user."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def read_given(
    options: Iterable[Option], parsed: Mapping[str, Any], environment: Mapping[str, str], mistakes: Mistakes
) -> dict[str, Any]:
    """These options' values from a parsed command line and an environment, by name; `mistakes` gets what is wrong."""
    given: dict[str, Any] = {}
    for option in options:
        if option.name in parsed:
            value = parsed[option.name]
            given[option.name] = _spread(value) if option.takes_several else value
        elif variable := next(filter(environment.get, option.variables), None):
            try:
                given[option.name] = _from_environment(option, environment[variable])
            except ValueError as error:
                mistakes.add(f"${variable}: {error}")
    return given


def read_asked(
    parser: OptionParser,
    title: str,
    options: Sequence[Option],
    arguments: Sequence[str],
    ask: Callable[[str, Mapping[str, Any]], T],
) -> tuple[dict[str, Any], T]:
    """Read the command line of a command about one MODEL, for which the declared options are a group of this title.

    Returns what was given, by name, and `ask` of the model and of these options' values. Prints all mistakes and exits
    with 2, if there are any; an OptionError of `ask` is one.
    """
    group = parser.add_argument_group(title)
    for option in options:
        add_option(group, option)
    mistakes = Mistakes()
    parsed = parser.read(arguments, mistakes)
    given = read_given(options, parsed, os.environ, mistakes)
    asked = mistakes.attempt(ask, parsed.get("model", ""), given)
    parser.refuse(mistakes)
    return parsed, made(asked)


def build(kind: type[OptionsT], given: Mapping[str, Any], **others: Any) -> OptionsT:
    """A dataclass of options from what was given, and from its other fields. Raises OptionError."""
    values = {o.field: o.field_value(given[o.name]) for o in options_of(kind) if o.name in given}
    return kind.of_given(values, **others)


def shown_options(options: Iterable[Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all options, given or not, but of the secret ones."""
    return {o.name: given.get(o.name, o.given_default) for o in options if not o.declaration.secret}


def _without(line: Sequence[str], flags: Collection[str]) -> list[str]:
    """A line without these flags, and without what stands behind them up to the next flag: it may be their values."""
    kept, dropping = [], False
    for argument in line:
        name, equals, _ = argument.partition("=")
        if is_flag(argument):
            dropping = name in flags and not equals
            if name in flags:
                continue
        if not dropping:
            kept.append(argument)
    return kept


def _spread(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(item for value in values for item in (value if isinstance(value, list) else [value]))


def _from_environment(option: Option, text: str) -> Any:
    if option.is_switch:
        return switch(text)
    if option.takes_several:
        return _spread(option.read(item) for item in ([text] if text.startswith("[") else text.split()))
    value = option.read(text)
    option.check_choice(value, text)
    return value
