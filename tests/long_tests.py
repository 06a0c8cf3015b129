"""No test may take long: with `--longest SECONDS`, which `make test` gives, one that takes longer is named at the end.

One that takes three times as long fails. Between the two lie the speeds of the machines that people have, and a
machine that is slow on some day is no reason to refuse a change.
A test's seconds do not depend on the machine's other work. They are the processor time of the test's process, or the
time in which no process of the machine waited for a core, if that is more.
`long_tests.txt` names the tests, files and folders that may take longer, and says why.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

ALLOWED = Path(__file__).with_suffix(".txt")
# https://docs.kernel.org/accounting/psi.html. Without it, time in which other processes had the cores counts too.
_PRESSURE = Path("/proc/pressure/cpu")


class Clocks(NamedTuple):
    """Seconds since some time in the past."""

    processor: float
    undisturbed: float

    @classmethod
    def read(cls) -> Clocks:
        used = os.times()
        waited_us = 0
        if _PRESSURE.exists() and (found := re.match(r"some .*total=(\d+)", _PRESSURE.read_text())):
            waited_us = int(found[1])
        # Without children's time, which is known only when they end: a browser's would count for a module's last test.
        return cls(used.user + used.system, time.monotonic() - waited_us / 1e6)


_BEGIN = pytest.StashKey[Clocks]()
_TAKEN = "seconds of a long test"
_FAILS_AT = 3.0  # times the limit
_CURE = f"make it cheaper, mark it `sweep`, or name it with a reason in tests/{ALLOWED.name}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--longest", type=float, metavar="SECONDS", help="name each test that takes longer")


def allowed() -> tuple[str, ...]:
    """With what the names of the tests begin that may take longer."""
    lines = ALLOWED.read_text("utf-8").splitlines()
    return tuple(line.split(maxsplit=1)[0] for line in lines if line and not line.startswith("#"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGIN] = Clocks.read()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    longest = item.config.getoption("--longest")
    begin, end = item.stash[_BEGIN], Clocks.read()
    taken = max(end.processor - begin.processor, end.undisturbed - begin.undisturbed)
    if longest is None or taken <= longest or item.nodeid.startswith(allowed()):
        return
    if taken <= _FAILS_AT * longest:
        item.user_properties.append((_TAKEN, taken))  # which the reports take to the process that writes the summary
    else:
        pytest.fail(f"took {taken:.1f} s where {longest:g} are allowed: {_CURE}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    teardowns = (report for report in terminalreporter.stats.get("", []) if report.when == "teardown")
    found = {report.nodeid: taken for report in teardowns if (taken := dict(report.user_properties).get(_TAKEN))}
    if found:
        terminalreporter.section("took longer than they may")
        for name, taken in found.items():
            terminalreporter.write_line(f"{taken:5.1f} s  {name}")
        terminalreporter.write_line(_CURE)
