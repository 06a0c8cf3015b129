"""The environment variables that mean something, and what becomes of others that begin as Tidewheel's or vLLM's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from tidewheel.engine.declaring.option import Option

from .hints import hint
from .vllm_variables import REFUSED, idle_lines, why_idle

_OURS, _VLLMS = "TIDEWHEEL_", "VLLM_"

# No option of `serve`: read elsewhere, or by what surrounds the server.
KNOWN = {
    "TIDEWHEEL_ISA": "the level of the kernels",
    "TIDEWHEEL_CPUS": "docker-compose.yml",
    "TIDEWHEEL_IMAGE": "docker-compose.yml",
    "TIDEWHEEL_PUBLISH": "docker-compose.yml",
    "TIDEWHEEL_FUZZ_EXAMPLES": "the tests",
    "TIDEWHEEL_SKIPPED": "the tests",
    "TIDEWHEEL_UPDATE_GOLDEN": "the tests",
    "VLLM_CPU_MOE_PREPACK": "whether experts are packed",
}
"""Variables that are no options, and who reads them."""

# Kubernetes sets these for each Service of the namespace, such as one that is named tidewheel-chat.
_OF_A_SERVICE = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def as_arguments(options: Iterable[Option], environment: Mapping[str, str], flags: Iterable[str]) -> list[str]:
    """The variables of `flags` that are no options, as a command line."""
    known = {name for option in options for name in option.variables}
    found = []
    for flag in flags:
        name = _variable(flag)
        if name not in known and (value := environment.get(name)):
            found.append(f"--no-{flag[2:]}" if value.lower() in ("0", "false", "no", "off") else f"{flag}={value}")
    return found


def _variable(flag: str) -> str:
    return _OURS + flag.removeprefix("--").replace("-", "_").upper()


def unknown_variables(
    options: Iterable[Option], environment: Mapping[str, str], flags: Iterable[str] = ()
) -> Iterator[str]:
    """What is wrong with the environment. Variables for options, for other `flags`, and in KNOWN are fine."""
    known = {*KNOWN, *map(_variable, flags), *(name for option in options for name in option.variables)}
    wrong = []
    for name, value in environment.items():
        if not value or name in known or not name.startswith(_OURS):
            continue
        if _OF_A_SERVICE.search(name) or _ADDRESS.match(value):
            continue
        wrong.append(f"${name}{hint(name, known)}")
    if wrong:
        yield f"unknown environment variable{'s' * (len(wrong) > 1)} {', '.join(sorted(wrong))}; see --help"
    for name, why in REFUSED.items():
        if environment.get(name, "0") not in ("", "0", "false", "False"):
            yield f"${name} is not supported: {why}"


def idle_variables(options: Iterable[Option], environment: Mapping[str, str]) -> Iterator[str]:
    """What to log of vLLM's variables that are set and mean nothing here."""
    known = {*KNOWN, *REFUSED, *(name for option in options for name in option.variables)}
    idle = [name for name in environment if name.startswith(_VLLMS) and name not in known]
    if not idle:
        return
    unknown = [name for name in idle if why_idle(name) is None]
    yield from idle_lines([name for name in idle if name not in unknown])
    if unknown:
        meant = [name for name in known if name.startswith(_VLLMS)]
        hinted = ", ".join(name + hint(name, meant) for name in sorted(unknown))
        has = "has" if len(unknown) == 1 else "have"
        yield f"{hinted} {has} no effect: neither Tidewheel nor vLLM has such a variable"
