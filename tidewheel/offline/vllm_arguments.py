"""The arguments of vLLM's LLM that are no options here: the table of vLLM's flags says what becomes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from functools import cache
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes
from tidewheel.server.options.vllm_flags import CONVERTED, VllmFlag, fitting, flags_of, vllm_flags
from tidewheel.server.options.vllm_table import RENAMED

from .vllm_calls import OF_STARTS

_ACCEPTED = {
    "an LLM is one engine": "--data-parallel-size=1",
    "an LLM logs no requests and no statistics; its outputs have metrics": "--disable-log-requests --disable-log-stats "
    "--enable-log-requests --max-log-len=",
    "the format of reasoning is found in the chat template": "--reasoning-parser=",
    "prompts do not name the model": "--served-model-name=*",
    "the stages of a pipeline are processes here, and all else is in this one": "--distributed-executor-backend=mp",
}
_REFUSED = {
    "an LLM is one engine; `tidewheel serve` starts replicas (docs/scale-out.md)": "--data-parallel-size=",
    "only the server sends traces; leave it out": "--otlp-traces-endpoint=",
    "set HF_TOKEN": "--hf-token=",
    "the model stays in memory; shutdown() frees it": "--enable-sleep-mode",
}
"""Arguments that have another answer without a server, written as in the table; these go first."""

_FLAG = re.compile(r"--([a-z][a-z-]*[a-z])")


def take_vllm_arguments(
    given: Mapping[str, Any], declared: Collection[str], mistakes: Mistakes
) -> tuple[dict[str, Any], list[str]]:
    """The arguments without those that are vLLM's, and what to log of these. `declared` are the options here.

    `mistakes` gets all that are not supported, with what to do instead.
    """
    ours: dict[str, Any] = {}
    notes = []
    for given_name, value in given.items():
        if given_name in OF_STARTS:
            notes.append(f"{given_name} has no effect: {OF_STARTS[given_name]}")
            continue
        name = given_name if given_name in declared else _renamed(given_name, declared)
        if (flag_of := _flag(name)) in CONVERTED:
            meant, convert = CONVERTED[flag_of]
            try:
                ours[_argument(meant)] = convert(str(value))
            except ValueError as error:
                mistakes.add(f"{name}: {error}")
            continue
        flag = _fitting(name, value, is_declared=name in declared)
        if flag is not None and flag.takes == 0 and not isinstance(value, bool):
            mistakes.add(f"{name} must be True or False, got {value!r}")
        elif flag is None:
            ours[name] = value
        else:
            shown = name if flag.value is None else f"{name}={value!r}"
            why = _FLAG.sub(lambda found: _named(found[0], declared), flag.why)
            if flag.accepted:
                notes.append(f"{shown} has no effect: {why}")
            elif value is False or (isinstance(value, Sized) and not len(value)):
                notes.append(f"{shown} has no effect: it asks for nothing")
            else:
                mistakes.add(f"{shown} is not supported: {why}")
    return ours, notes


def vllm_arguments(declared: Collection[str]) -> dict[str, int]:
    """All that are no options here, by name, and how many values each takes, as VllmFlag says it."""
    renamed = {flag: 1 for flag in RENAMED if _renamed(_argument(flag), declared) != _argument(flag)}
    flags = {**renamed, **dict.fromkeys(CONVERTED, 1), **{flag: found[0].takes for flag, found in _flags().items()}}
    return {name: takes for flag, takes in flags.items() if (name := _argument(flag)) not in declared}


@cache
def _flags() -> Mapping[str, Sequence[VllmFlag]]:
    own = flags_of((_ACCEPTED, True), (_REFUSED, False))
    names = {*own, *vllm_flags()}
    each = {name: [*own.get(name, ()), *vllm_flags().get(name, ())] for name in names}
    return {name: sorted(flags, key=lambda flag: flag.value is None) for name, flags in each.items()}


def _fitting(name: str, value: Any, *, is_declared: bool) -> VllmFlag | None:
    """The entry for an argument with this value, if there is one."""
    flags = _flags().get(_flag(name), ())
    text = "" if isinstance(value, bool) else " ".join(_texts(value))
    return fitting(flags, text, is_declared=is_declared)


def _renamed(name: str, declared: Collection[str]) -> str:
    """The option that an older or newer name of vLLM's means; the same name if it means none."""
    meant = _argument(RENAMED.get(_flag(name), ""))
    return meant if meant in declared else name


def _texts(value: Any) -> Iterator[str]:
    """A value as a command line has it."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, float):
        yield f"{value:g}"
    elif isinstance(value, Mapping):
        yield json.dumps(value, default=str)
    else:
        yield str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _named(flag: str, declared: Collection[str]) -> str:
    """A flag that a reason names, as the argument that LLM has of that name."""
    name = _argument(flag)
    return name if name in declared else flag
