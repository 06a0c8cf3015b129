"""The options of a server with several models, and the models that a command line names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from tidewheel.engine.declaring.option import Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.declaring.values import at_least, count, number_or_none

MAX_NAME = 200
"""The longest name of a model, in characters."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[MGT](?:i?B)?)?", re.IGNORECASE)
_GIB = {"": 1.0, "m": 2.0**-10, "g": 1.0, "t": 2.0**10}


def _check_memory(text: str) -> str | None:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0 or (match[2] == "%" and float(match[1]) > 100):
        return "must be GiB such as 48, or a share of the memory such as 80%"
    return None


@record(frozen=True, kw_only=True)
class HostingOptions(Options):
    """Which models one server has, and how many of them are loaded at once. Times are in seconds."""

    models_dir: str | None = option(
        None, "a folder of models, each of which is loaded when a request names it", metavar="FOLDER"
    )
    memory: str = option(
        "80%",
        "memory for the weights and KV caches of all models together, in GiB, or a share of what is available at the "
        "start, such as 50%",
        check=_check_memory,
        metavar="GIB|SHARE",
    )
    max_loaded_models: int | None = option(
        None,
        "most models that are loaded at once; 0 is as many as --memory holds [as many]",
        parse=lambda text: count(text) or None,
        check=at_least(1),
        metavar="N",
    )
    model_idle_timeout_s: float | None = option(
        None,
        "unload a model that no request has used for so long; 0 is never [never]",
        flag="--model-idle-timeout",
        parse=number_or_none,
        check=at_least(0),
        metavar="SECONDS",
    )
    allow_model_management: bool = option(
        False, "let admin keys download models to --models-dir, copy and delete them, through Ollama's API"
    )

    def memory_bytes(self, available: int) -> int:
        """The bytes that models may have, of those that are available at the start."""
        match = _AMOUNT.fullmatch(self.memory.strip())
        assert match is not None  # it was checked
        number, unit = float(match[1]), (match[2] or "").lower()
        if unit == "%":
            return int(available * number / 100)
        return int(number * _GIB[unit[:1]] * 2**30)

    def _contradictions(self) -> Iterator[str]:
        if self.allow_model_management and self.models_dir is None:
            yield "--allow-model-management needs --models-dir, the folder that models are downloaded to"


class ModelSection(Struct, frozen=True, kw_only=True):
    """A model as the operator names it.

    `where` is a folder, a file or a hub id; None means the one of that name in --models-dir. `given` has the options of
    this model alone, by name: those that all models have are not in it. `idle_s` is in seconds; None is never, and
    `has_idle` says whether it was given.
    """

    name: str
    where: str | None
    given: Mapping[str, Any] = {}
    aliases: tuple[str, ...] = ()
    pin: bool = False
    preload: bool = False
    idle_s: float | None = None
    has_idle: bool = False


def split_named(text: str) -> tuple[str | None, str]:
    """NAME=WHERE as the two, and a model without a name as None and itself. A path may have a = in it."""
    name, equals, where = text.partition("=")
    if not (equals and where) or wrong_name(name) or _exists(text):
        return None, text
    return name, where


def wrong_name(name: str) -> str | None:
    """Why a model cannot have that name; None if it can. No name looks like a path, and all can be shown."""
    if not name or len(name) > MAX_NAME:
        return f"must have 1 to {MAX_NAME} characters"
    if not name.isprintable() or name != name.strip() or "\ufffd" in name:
        return "must have only characters that can be shown, and no spaces around it"
    if (
        name.startswith(("/", ".", "-", "~"))
        or name.endswith("/")
        or {"", ".", ".."} & {*name.split("/")}
        or "\\" in name
    ):
        return "must not look like a path: it begins with a letter or digit, as in owner/name"
    return None


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
