"""FlexibleArgumentParser: an argparse parser for scripts, with vLLM's spellings and `--config`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from tidewheel.engine.declaring.option import OptionError
from tidewheel.server.options.config_file import read_config_file
from tidewheel.server.options.spelling import is_flag, spelled
from tidewheel.server.options.vllm_flags import long_form


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that knows flags also with underscores, vLLM's short flags, and dotted keys for JSON.

    `--config FILE` reads more flags from a YAML file, unless the parser has a flag of that name; the command line goes
    before the file. Flags are not abbreviated unless `allow_abbrev` says so.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(*args, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ArgumentParser."""
        line = [*(sys.argv[1:] if args is None else args)]
        end = line.index("--") if "--" in line else len(line)
        known = [*self._known(line[:end])]
        if self._subparsers is None and "--config" not in self._option_string_actions:  # else a subparser reads it
            known = self._with_file(known)
        return super().parse_known_args([*known, *line[end:]], namespace)

    def _known(self, line: Sequence[str]) -> Iterator[str]:
        """The line in the spellings that this parser has."""
        flags = self._option_string_actions
        by_hyphens = {flag.replace("_", "-"): flag for flag in flags}
        for argument in spelled([self._long(argument) for argument in line]):
            name, equals, value = argument.partition("=")
            yield by_hyphens.get(name, name) + equals + value if name not in flags else argument

    def _long(self, argument: str) -> str:
        if argument.partition("=")[0] in self._option_string_actions:
            return argument
        meant = long_form(argument)
        return meant if meant.partition("=")[0].partition(".")[0] in self._option_string_actions else argument

    def _with_file(self, line: Sequence[str]) -> list[str]:
        """The line without --config, and with what the file says and the line does not."""
        finder = argparse.ArgumentParser(self.prog, add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        found, rest = finder.parse_known_args(line)
        if found.config is None:
            return rest
        try:
            options, models = read_config_file(found.config)
        except OptionError as error:
            self.error(str(error))
        if models is not None:
            self.error(f"--config: {found.config} has models:, which only tidewheel serve takes; name one with model:")
        of_file = [*self._known(options)]
        said = {self._destination(argument) for argument in rest if is_flag(argument)}
        for name, arguments in groupby(of_file, lambda argument: argument.partition("=")[0]):
            if self._destination(name) not in said:
                rest += self._one_flag(name, [*arguments])
        return rest

    def _destination(self, argument: str) -> str:
        name = argument.partition("=")[0]
        action = self._option_string_actions.get(name)
        return name if action is None else action.dest

    def _one_flag(self, name: str, arguments: list[str]) -> list[str]:
        """A file's arguments for a flag, in the form that this parser takes."""
        flags = self._option_string_actions
        if name not in flags and name.startswith("--no-") and name.replace("--no-", "--", 1) in flags:
            return []  # a switch that is off when it is left out
        if name in flags and flags[name].nargs in ("+", "*"):
            return [name, *(argument.partition("=")[2] for argument in arguments)]
        return arguments
