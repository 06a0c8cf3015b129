"""An option is declared once, on the field that uses it: type, default, range, and the words for people.

A command line is made from the declarations. A program that makes the dataclass itself is held to the same ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..errors import TidewheelError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_ENV_PREFIX = "TIDEWHEEL_"
_METADATA = "option"

REQUIRED: Any = MISSING
"""The default of an option that has none: a value must be given when the dataclass is made."""

OptionsT = TypeVar("OptionsT", bound="Options")


class OptionError(TidewheelError):
    """Options whose values cannot be used, or that contradict each other: a sentence for each thing that is wrong."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(*sentences)
        self.sentences = sentences

    def __str__(self) -> str:
        """One is a line, several are a list."""
        if len(self.sentences) == 1:
            return self.sentences[0]
        return "\n  ".join([f"{len(self.sentences)} things are wrong:", *self.sentences])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What `option` was told about an option: see there."""

    help: str
    flag: str | None
    turns_off: bool
    parse: Callable[[str], Any]
    check: Callable[[Any], str | None] | None
    choices: Sequence[str] | None
    metavar: str | None
    env_aliases: Sequence[str]
    flag_aliases: Sequence[str]
    secret: bool


def option(
    default: Any,
    help_text: str,
    *,
    flag: str | None = None,
    turns_off: bool = False,
    parse: Callable[[str], Any] = str,
    check: Callable[[Any], str | None] | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    env_aliases: Sequence[str] = (),
    flag_aliases: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """A field that is an option. One whose default is a bool is a switch, a tuple takes several values.

    `flag` is for a field whose name is not the flag's, because it has a unit or a plural. A switch that is on by
    default and that its flag turns off has `turns_off`. `parse` makes a text a value, or raises ValueError; for one of
    several values it may give a list, which is spread out. `check` returns what a value must be, or None if it is so;
    see `values`. None is never checked. A `secret` option is never shown, nor is its value in an error.
    """
    declaration = Declaration(
        help=help_text,
        flag=flag,
        turns_off=turns_off,
        parse=parse,
        check=check,
        choices=choices,
        metavar=metavar,
        env_aliases=env_aliases,
        flag_aliases=flag_aliases,
        secret=secret,
    )
    return field(default=default, repr=not secret, metadata={_METADATA: declaration})


@dataclass(frozen=True, slots=True)
class Option:
    """A declared option and its field; `default` is the field's, None where there is none."""

    field: str
    default: Any
    declaration: Declaration

    @property
    def flag(self) -> str:
        """As it is given on a command line: --max-model-len."""
        return self.declaration.flag or "--" + self.field.replace("_", "-")

    @property
    def name(self) -> str:
        """As it is shown: max_model_len."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variables(self) -> Sequence[str]:
        """The environment variables that it is read from; the first that is set goes first."""
        return (_ENV_PREFIX + self.name.upper(), *self.declaration.env_aliases)

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return isinstance(self.default, bool)

    @property
    def takes_several(self) -> bool:
        """Whether it has several values."""
        return isinstance(self.default, tuple)

    @property
    def given_default(self) -> Any:
        """The default in the flag's sense: a switch that is on, and turned off by its flag, is False by default."""
        return self.field_value(self.default)

    def field_value(self, given: Any) -> Any:
        """The field's value for what was given for the flag, or the other way round."""
        return not given if self.declaration.turns_off else given

    def read(self, text: str) -> Any:
        """A text's value, in range; choices are not looked at. Raises ValueError with words for the user."""
        value = self.declaration.parse(text)
        for item in value if isinstance(value, list) else [value]:
            self._check(item, text)
        return value

    def check_choice(self, value: Any, given: object) -> None:
        """Raises ValueError if there are choices and `value` is not one of them; the message quotes `given`."""
        choices = self.declaration.choices
        if choices is not None and value is not None and value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {given!r}")

    def check(self, value: Any) -> None:
        """Raises ValueError for a value of the field that is not one of the choices or out of range."""
        for item in value if self.takes_several else [value]:
            self.check_choice(item, item)
            self._check(item, item)

    def _check(self, value: Any, given: object) -> None:
        if self.declaration.check is None or value is None:
            return
        if reason := self.declaration.check(value):
            raise ValueError(reason if self.declaration.secret else f"{reason}, got {given!r}")


class Options:
    """Base of frozen dataclasses that have options.

    Making one raises OptionError, which tells all values that cannot be used, else all that contradict each other.
    """

    _given: Collection[str] | None = None  # the fields, where a command line tells them

    @classmethod
    def of_given(cls: type[OptionsT], values: Mapping[str, Any], **others: Any) -> OptionsT:
        """One with the `values` that a command line gives to its options, by field.

        It knows that they were given, even if they are the defaults. `others` are its other fields.
        """
        made = cls(**values, **others)
        object.__setattr__(made, "_given", frozenset(values))
        return made

    def given_flags(self, names: Iterable[str] | None = None) -> list[str]:
        """The flags of these fields, or of all, that were given; if that is unknown, those not as by default."""
        wanted = None if names is None else {*names}
        return [
            declared.flag
            for declared in options_of(type(self))
            if (wanted is None or declared.field in wanted) and self._was_given(declared)
        ]

    def __post_init__(self) -> None:
        if wrong := [*self._unusable()] or [*self._contradictions()]:
            raise OptionError(*wrong)

    def _unusable(self) -> Iterator[str]:
        for declared in options_of(type(self)):
            try:
                declared.check(getattr(self, declared.field))
            except ValueError as error:
                yield f"{declared.field}: {error}"

    def _contradictions(self) -> Iterator[str]:
        """Contradictions between options that are fine one by one, a sentence each."""
        yield from ()

    def _was_given(self, declared: Option) -> bool:
        if self._given is None:
            return bool(getattr(self, declared.field) != declared.default)
        return declared.field in self._given

    def differing_flags(self, names: Iterable[str]) -> list[str]:
        """The flags of these fields whose values are not the defaults."""
        by_field = {declared.field: declared for declared in options_of(type(self))}
        return [by_field[name].flag for name in names if getattr(self, name) != by_field[name].default]

    def _needing(self, names: Iterable[str], what: str) -> Iterator[str]:
        """The sentence that fields with other values than the defaults need `what`, if there are any."""
        if flags := self.differing_flags(names):
            yield f"{listed(flags)} {'needs' if len(flags) == 1 else 'need'} {what}"


def listed(names: Sequence[str]) -> str:
    """The names as a sentence has them: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def options_of(kind: type[Options]) -> list[Option]:
    """The options that a dataclass declares, in the order of its fields."""
    return [
        Option(spec.name, None if spec.default is MISSING else spec.default, spec.metadata[_METADATA])
        for spec in fields(cast("type[DataclassInstance]", kind))
        if _METADATA in spec.metadata
    ]
