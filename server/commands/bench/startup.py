"""Start-up: a real `tidewheel serve`, from the start of its process to the first good answer of `/health`."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tidewheel
from tidewheel.engine.errors import TidewheelError

from .process_memory import peak_bytes, resident_bytes
from .spread import Spread

# The file and not `-m tidewheel`, which would look for the package in the current folder first.
_PROGRAM = str(Path(tidewheel.__file__).with_name("__main__.py"))
_HOST = "127.0.0.1"
_POLL_S = 0.005
_TIMEOUT_S = 600.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Startup:
    """`seconds` from process start to ready; at that moment, the server's resident set and its peak, in bytes."""

    seconds: Spread
    resident_bytes: int | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Start:
    seconds: float
    resident_bytes: int | None
    peak_bytes: int | None


def measure_startup(serve_arguments: Sequence[str], repeats: int) -> Startup:
    """Start and stop the server `repeats` times. Raises TidewheelError with its last words if it does not start."""
    measured = [_start_once(serve_arguments) for _ in range(repeats)]
    return Startup(
        Spread.of([start.seconds for start in measured]),
        max((start.resident_bytes for start in measured if start.resident_bytes is not None), default=None),
        max((start.peak_bytes for start in measured if start.peak_bytes is not None), default=None),
    )


def _start_once(serve_arguments: Sequence[str]) -> _Start:
    port = _free_port()
    command = [sys.executable, _PROGRAM, "serve", *serve_arguments, "--host", _HOST, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        try:
            while not _is_ready(port):
                if process.poll() is not None:
                    raise TidewheelError(f"the server did not start: {_last_line(log)}")
                if time.perf_counter() - started > _TIMEOUT_S:
                    raise TidewheelError(f"the server was not ready after {_TIMEOUT_S:g} s")
                time.sleep(_POLL_S)
            seconds = time.perf_counter() - started
            return _Start(seconds, resident_bytes(process.pid), peak_bytes(process.pid))
        finally:
            _stop(process)


def _environment() -> dict[str, str]:
    # The arguments hold what options the environment had for the model; others would make it another kind of server.
    # And where Python's compiled modules are not kept, each start would compile a thousand of them.
    return {
        name: value
        for name, value in os.environ.items()
        if name == "TIDEWHEEL_ISA" or not name.startswith(("TIDEWHEEL_", "PYTHONDONTWRITEBYTECODE"))
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        return int(free.getsockname()[1])


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_STOP_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
