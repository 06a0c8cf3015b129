"""No test may take long: with `--longest SECONDS`, which `make test` gives, a test that takes longer fails.

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--longest", type=float, metavar="SECONDS", help="fail a test that takes longer")


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
    taken = max(end - begin for end, begin in zip(Clocks.read(), item.stash[_BEGIN], strict=True))
    if longest is not None and taken > longest and not item.nodeid.startswith(allowed()):
        pytest.fail(
            f"took {taken:.1f} s where {longest:g} are allowed: make it cheaper, mark it `sweep`, or name it with a "
            f"reason in tests/{ALLOWED.name}",
            pytrace=False,
        )
