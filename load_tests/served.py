"""A `tidewheel serve` that a scenario starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
from storm import StormError

import tidewheel

# The file and not `-m tidewheel`, which would look for the package in the current folder first.
_PROGRAM = str(Path(tidewheel.__file__).with_name("__main__.py"))
_START_TIMEOUT_S = 120
_EXIT_TIMEOUT_S = 40  # its --shutdown-timeout of 30 s, and some more


@contextmanager
def served(
    options: Sequence[str], port: int, log: str, ended_by: signal.Signals = signal.SIGTERM
) -> Iterator[tuple[str, subprocess.Popen[bytes], list[str]]]:
    """A server during the context: its address, its process, and a list for what is wrong, also when it ends.

    Its log goes to the end of a file. Raises StormError if it does not start.
    """
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, _PROGRAM, "serve", "--port", str(port), *options]
    # Names may be hub ids, but a test must not use the hub.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # Under nohup the server would ignore SIGHUP.
    hear = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with (
        open(log, "a") as file,
        subprocess.Popen(command, stderr=file, env=environment, preexec_fn=hear) as process,
    ):
        try:
            _await_health(url, process)
            wrong: list[str] = []
            yield url, process, wrong
            process.send_signal(ended_by)
            asked = time.monotonic()
            try:
                code = process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                wrong.append(f"{ended_by.name} has not ended the server after {_EXIT_TIMEOUT_S} s")
                return
            print(f"ended by {ended_by.name} after {time.monotonic() - asked:.1f} s with {code}")
            if code != 0:
                wrong.append(f"the server ended with {code}")
        finally:
            process.kill()


def _await_health(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return
        except httpx.HTTPError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise StormError(f"the server does not start: {error}") from error
            time.sleep(0.05)
