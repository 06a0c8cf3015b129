"""`--config`: options from a YAML file, whose keys are flags: `max-model-len: 4096`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tidewheel.engine.declaring.option import OptionError, Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.reading import read_file
from tidewheel.engine.files.wording import one_line

_MAX_BYTES = 1 << 20


@record(frozen=True, kw_only=True)
class ConfigFileOptions(Options):
    """Where more options are."""

    config: str | None = option(
        None,
        "a YAML file with more options, such as max-model-len: 4096; the command line takes precedence",
        metavar="FILE",
    )


def read_config_file(path: str) -> tuple[list[str], object]:
    """The options of a file as a command line, and its `models`, None if it has none (see `model_sections`).

    Raises OptionError, saying what is wrong with the file.
    """
    import yaml  # which few starts need

    try:
        options = yaml.safe_load(read_file(Path(path), _MAX_BYTES))
    except ModelError as error:
        raise OptionError(f"--config: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"--config: {path} is not valid YAML: {_fault(error)}") from error
    if options is None:
        return [], None
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise OptionError(f"--config: {path} must have one option a line, such as max-model-len: 4096")
    if "config" in options:
        raise OptionError(f"--config: {path} names another file with config; give all options in one")
    return as_command_line({key: value for key, value in options.items() if key != "models"}), options.get("models")


def _fault(error: Exception) -> str:
    """What is wrong and where, without the lines around it: they may contain a key."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {one_line(getattr(error, 'problem', None) or '')}"
    return one_line(str(error).partition("\n")[0])


def as_command_line(options: Mapping[str, Any]) -> list[str]:
    """Options whose names are flags, with hyphens or underscores, as a command line."""
    return [argument for key, value in options.items() for argument in _arguments(key, value)]


def _arguments(key: str, value: Any) -> Iterator[str]:
    flag = f"--{key}"
    if isinstance(value, bool):
        yield flag if value else f"--no-{key}"
    elif isinstance(value, list):
        yield from (f"{flag}={_text(item)}" for item in value)
    elif value is not None:
        yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
