"""The flags of vLLM's server that are no options here: some are accepted without effect, others are refused.

`vllm_table` says which, and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from itertools import takewhile
from types import MappingProxyType

from msgspec import Struct

from tidewheel.engine.declaring.record import record
from tidewheel.engine.declaring.values import positive_count

from .spelling import is_flag, spelled, take_positionals
from .vllm_table import ACCEPTED, NOT_YET, REFUSED, RENAMED, SHORT

_MANY = 2


def _gib(text: str) -> str:
    """A number of bytes, such as 512M, in GiB. Raises ValueError."""
    return str(positive_count(text) / 2**30)


CONVERTED: Mapping[str, tuple[str, Callable[[str], str]]] = {"--kv-cache-memory-bytes": ("--kv-cache-space", _gib)}
"""Flags that are options here in another unit, with what makes a value of one a value of the other."""


class VllmFlag(Struct, frozen=True):
    """What becomes of a flag with one `value`; None: with all values that have no line of their own.

    `takes` is how many values it takes: 0, 1, or 2 for any number.
    """

    name: str
    value: str | None
    takes: int
    accepted: bool
    why: str


@record(frozen=True, slots=True)
class VllmLine:
    """A command line without vLLM's flags: `notes` say what has no effect, `refusals` what is not supported."""

    ours: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


@cache
def vllm_flags() -> Mapping[str, Sequence[VllmFlag]]:
    """All of them by name, those with a value first."""
    return flags_of((ACCEPTED, True), (REFUSED, False), (NOT_YET, False))


def flags_of(*tables: tuple[Mapping[str, str], bool]) -> dict[str, list[VllmFlag]]:
    """The flags of tables as `vllm_table` has them by name, those with a value first; with each, if it accepts them."""
    found: dict[str, list[VllmFlag]] = {}
    for table, accepted in tables:
        for why, flags in table.items():
            for text in flags.split():
                name, equals, value = text.partition("=")
                takes = 0 if not equals else _MANY if value == "*" else 1
                flag = VllmFlag(name, value if value not in ("", "*") else None, takes, accepted, why)
                found.setdefault(name, []).append(flag)
    return {name: sorted(flags, key=lambda flag: flag.value is None) for name, flags in found.items()}


def read_vllm_line(
    arguments: Sequence[str], declared: Collection[str], others: Mapping[str, Sequence[VllmFlag]] = MappingProxyType({})
) -> VllmLine:
    """Take vLLM's flags, and `others`, out of a command line, except flags that are `declared` here."""
    line, table = VllmLine(), {**vllm_flags(), **others}
    rest = [*reversed(spelled([*_in_full(arguments)]))]
    while rest:
        argument = rest.pop()
        name, equals, value = argument.partition("=")
        if name in CONVERTED:
            ours, convert = CONVERTED[name]
            try:
                line.ours.append(f"{ours}={convert(value if equals else rest.pop() if rest else '')}")
            except ValueError as error:
                line.refusals.append(f"{name}: {error}")
            continue
        turned_off = name.startswith("--no-") and name not in declared and name not in table
        flags = table.get("--" + name.removeprefix("--no-") if turned_off else name, ())
        values = [value] if equals or not flags else _following(rest, flags[0].takes)
        given = " ".join(values)
        flag = fitting(flags, given, is_declared=name in declared)
        if flag is None:
            line.ours.append(argument)
            continue
        if not equals:
            del rest[len(rest) - len(values) :]
        line.ours[:0] = take_positionals(rest)
        if turned_off or flag.accepted:
            line.notes.append(f"{name} has no effect: {flag.why if flag.accepted else 'it is never on'}")
        else:
            line.refusals.append(f"{name}{f' {given}' if flag.value else ''} is not supported: {flag.why}")
    return line


def long_form(argument: str) -> str:
    """A short flag, such as -tp or -O3, by its long name. Anything else stays as it is."""
    name, equals, value = argument.partition("=")
    head, dot, path = name.partition(".")
    if argument.startswith("-O") and argument[2:].isdigit():
        return f"--optimization-level={argument[2:]}"
    if head in SHORT:
        return ("--compilation-config" if head == "-O" and dot else SHORT[head]) + dot + path + equals + value
    return argument


def fitting(flags: Sequence[VllmFlag], given: str, *, is_declared: bool) -> VllmFlag | None:
    """The entry for a flag with the value `given`. A flag that is declared here has entries for single values only."""
    value = "0" if _asks_for_none(given) else given
    return next((flag for flag in flags if flag.value == value or (flag.value is None and not is_declared)), None)


def _asks_for_none(given: str) -> bool:
    """Whether it is 0 of each of several things: `{"image": 0, "video": 0}`, or `image=0,video=0` as in vLLM 0.6."""
    return re.fullmatch(r"\{?(\s*\"?\w+\"?\s*[:=]\s*0\s*,?)+\}?", given) is not None


def _in_full(arguments: Sequence[str]) -> Iterator[str]:
    """Short flags by their long names, and flags of one meaning under the name that they have here."""
    for argument in arguments:
        name, equals, value = long_form(argument).partition("=")
        head, dot, path = name.partition(".")
        yield RENAMED.get(head.replace("_", "-"), head) + dot + path + equals + value


def _following(rest: Sequence[str], takes: int) -> list[str]:
    """The values of a flag. The next one is last in `rest`. A switch may have its state, as in vLLM 0.6."""
    values = [*takewhile(lambda argument: not is_flag(argument), reversed(rest))]
    if takes == 0:
        return [value for value in values[:1] if value.lower() in ("true", "false")]
    return values if takes == _MANY else values[:takes]
