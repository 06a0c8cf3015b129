"""Tools for the tests that only the system can provide. Tests without them are skipped, and one line says so.

    python3 tests/system_tools.py missing TARGET...   a line for each tool that these targets of make use in vain
    python3 tests/system_tools.py packages TARGET...  the Debian packages of those
    python3 tests/system_tools.py need TOOL...        fails unless these are there, after a line for each that is not
    python3 tests/system_tools.py report FILE...      the lines that these files have, each once

`need` and the tests append their lines to the file TIDEWHEEL_SKIPPED, if that is set: `make test` ends with a report of
them. This runs on Python alone, before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDERS_OF_ROOT = "/usr/sbin:/sbin"  # not in everyone's path


@dataclass(frozen=True)
class Tool:
    """`find` says where it is. `tests` are those that need it, and `package` is Debian's that has it."""

    name: str
    package: str
    tests: str
    find: Callable[[], str | None]
    target: str = "test"

    @property
    def lack(self) -> str:
        """What a person reads where it is missing."""
        return f"Skipped: {self.tests} need {self.name} (apt-get install {self.package})"


def _command(*names: str) -> Callable[[], str | None]:
    path = f"{os.environ.get('PATH', '')}:{_FOLDERS_OF_ROOT}"
    return lambda: next(filter(None, (shutil.which(name, path=path) for name in names)), None)


@cache
def _doctest() -> str | None:
    header = "doctest/doctest.h"
    command = [*os.environ.get("CXX", "c++").split(), "-E", "-x", "c++", "-", "-o", os.devnull]
    try:
        done = subprocess.run(command, input=f"#include <{header}>\n", text=True, capture_output=True, check=False)
    except OSError:
        return None
    return header if done.returncode == 0 else None


def _cross_tools(machine: str, compiler: str) -> tuple[Tool, Tool]:
    target = "cross-test" if machine in _ALWAYS_EMULATED else f"cross-test-{machine}"
    tests, command, emulator = f"the C++ tests for {machine}", f"{compiler}-linux-gnu-g++", f"qemu-{machine}-static"
    return (
        Tool(command, f"g++-{compiler}-linux-gnu", tests, _command(command), target),
        Tool(emulator, "qemu-user-static", tests, _command(emulator), target),
    )


_MACHINES = {"aarch64": "aarch64", "s390x": "s390x", "riscv64": "riscv64", "ppc64le": "powerpc64le"}  # and a compiler's
_ALWAYS_EMULATED = ("aarch64", "s390x")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

TOOLS = {
    tool.name: tool
    for tool in (
        Tool("doctest", "doctest-dev", "the C++ tests", _doctest),
        Tool("chromium", "chromium", "the tests of the web page", _command(*_BROWSERS)),
        Tool("node", "nodejs", "the tests with Node.js clients", _command("node")),
        Tool("npm", "npm", "the tests with Node.js clients", _command("npm")),
        Tool("curl", "curl", "the tests with curl", _command("curl")),
        Tool("nginx", "nginx-light", "the tests behind nginx", _command("nginx")),
        Tool("haproxy", "haproxy", "the tests behind HAProxy", _command("haproxy")),
        Tool(
            "redis-server", "redis-server", "the tests of a Redis cluster and of Ray's head", _command("redis-server")
        ),
        Tool("systemd-analyze", "systemd", "the tests of the systemd unit", _command("systemd-analyze")),
        Tool("kubectl", "kubernetes-client", "the tests of the Kubernetes manifests", _command("kubectl")),
        *(
            Tool(command, package, "the tests of a container's first process", _command(command))
            for command, package in (("tini", "tini"), ("setpriv", "util-linux"), ("unshare", "util-linux"))
        ),
        *(tool for machine, compiler in _MACHINES.items() for tool in _cross_tools(machine, compiler)),
    )
}


def say_skipped(line: str) -> None:
    """Leave a line where `make test` looks for it."""
    if place := os.environ.get("TIDEWHEEL_SKIPPED"):
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        with open(place, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def require(name: str) -> str:
    """Where a tool is. Without it the test that asks is skipped."""
    import pytest

    tool = TOOLS[name]
    found = tool.find()
    if found is None:
        say_skipped(tool.lack)
        pytest.skip(tool.lack.removeprefix("Skipped: "))
    return found


def main(command: str, *names: str) -> int:
    """Runs a command line and returns its exit code."""
    if command == "report":
        files = [Path(name) for name in names if Path(name).exists()]
        print(
            *sorted({line for file in files for line in file.read_text("utf-8").splitlines(keepends=True)}),
            sep="",
            end="",
        )
        return 0
    asked = [TOOLS[name] for name in names] if command == "need" else [t for t in TOOLS.values() if t.target in names]
    missing = [tool for tool in asked if tool.find() is None]
    if command == "packages":
        print(*dict.fromkeys(tool.package for tool in missing))
        return 0
    for tool in missing:
        print(tool.lack)
        if command == "need":
            say_skipped(tool.lack)
    return int(command == "need" and bool(missing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
