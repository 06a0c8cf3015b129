"""Sandbox: keeps a process that does each piece of work in a process of its own, which may crash."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from .process import ANSWER, MESSAGE, READY, Outcome, receive

logger = logging.getLogger(__name__)

T = TypeVar("T")

_START_S = 60.0  # for the process to start, on a slow machine
_END_S, _LOOK_S = 1.0, 0.01
_GRACE_S = 5.0  # beyond its own limit, for a process to say how it ended
_MAX_ANSWER_BYTES = 64 * 2**20
_ENVIRONMENT = ("LD_LIBRARY_PATH",)  # what Python itself may need


class SandboxError(Exception):
    """No work can be done at the moment."""


class LostError(Exception):
    """A piece of work has ended without a result, for a reason that is not its own."""


class Answer(NamedTuple):
    """How a piece of work went: see Outcome."""

    outcome: Outcome
    number: int
    content: bytes


class Sandbox:
    """Does pieces of work, several at once. The process starts with the first one, and again after a crash.

    May be used from several threads.
    """

    def __init__(
        self,
        command: Callable[[], str],
        state: Callable[[], bytes],
        does: str,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`command` calls `serve` (process.py), and `state` is what it prepares with. Both are asked for when the
        process starts. `does` says in errors what "the process that ..." does. `environment` is added to its own.
        """
        self._command = command
        self._state = state
        self._environment = environment
        self._name = f"the process that {does}"
        self._lock = threading.Lock()  # of the process
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process unless it runs. Raises SandboxError."""
        with self._lock:
            if self._is_closed:
                raise SandboxError("the server is shutting down")
            if self._process is not None and not _has_changed(self._process, os.WEXITED | os.WSTOPPED):
                return
            self._end()
            try:
                self._start()
            except (OSError, EOFError) as error:
                self._end()
                if self._is_closed:
                    raise SandboxError("the server is shutting down") from error
                logger.exception("%s does not start", self._name.capitalize())
                raise SandboxError(f"this server cannot start {self._name}") from error

    def run(self, work: Callable[[socket.socket], T]) -> T:
        """The result of `work`, which gets a connection to a new process: see `ask`. If it is lost, it is tried again.

        Raises SandboxError if it is lost both times.
        """
        with contextlib.suppress(LostError):
            return self._run(work)
        try:
            return self._run(work)
        except LostError as error:
            raise SandboxError(f"{error}; try again later") from error

    def _run(self, work: Callable[[socket.socket], T]) -> T:
        with self._connection() as (connection, process):
            try:
                return work(connection)
            except TimeoutError as error:  # each piece of work has a shorter limit, so the process itself stands still
                _kill(process)
                raise LostError(f"{self._name} did not answer") from error
            except (OSError, EOFError) as error:
                _let_it_end(process)
                raise LostError(f"{self._name} has ended") from error

    @contextlib.contextmanager
    def _connection(self) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self.start()
                process, to_process = self._process, self._socket
                assert process is not None
                assert to_process is not None
                try:
                    socket.send_fds(to_process, [b"\n"], [theirs.fileno()])
                except OSError as error:
                    _let_it_end(process)
                    raise LostError(f"{self._name} has ended") from error
            yield ours, process

    def close(self) -> None:
        """End the process and all work. Those who wait get an error at once."""
        self._is_closed = True
        if self._process is not None:  # without the lock, which a slow start may hold for long
            _kill(self._process)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        path = [os.path.abspath(entry) for entry in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", self._command(), str(theirs.fileno()), *path],
                # One arena: each thread's own would take address space from what the work may have.
                env={**environment, **self._environment, "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that it can be killed together with everything that it has forked
            )
        if self._is_closed:
            raise EOFError
        ours.settimeout(_START_S)
        send_message(ours, self._state())
        receive(ours.recv, len(READY))

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def send_message(connection: socket.socket, content: bytes) -> None:
    """Send what `receive_message` receives. Raises OSError."""
    connection.sendall(MESSAGE.pack(len(content)))
    connection.sendall(content)


def ask(connection: socket.socket, request: bytes, wall_s: float, on_slow: Callable[[], object]) -> Answer:
    """The answer of the work at the other end of a connection, which takes at most `wall_s`.

    `on_slow` is called if it takes long, and may raise. Raises OSError and EOFError if the other end has gone.
    """
    deadline = time.monotonic() + wall_s + _GRACE_S

    def recv(size: int) -> bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        return connection.recv(size)

    connection.settimeout(wall_s)
    send_message(connection, request)
    while True:
        outcome, number, length = ANSWER.unpack(receive(recv, ANSWER.size))
        if length > _MAX_ANSWER_BYTES or outcome not in list(Outcome):
            raise EOFError
        content = receive(recv, length)
        if outcome != Outcome.SLOW:
            return Answer(Outcome(outcome), number, content)
        on_slow()


def _let_it_end(process: subprocess.Popen[bytes]) -> None:
    """It may have been ended from outside, which takes a moment."""
    last = time.monotonic() + _END_S
    while not _has_changed(process, os.WEXITED) and time.monotonic() < last:
        time.sleep(_LOOK_S)


def _has_changed(process: subprocess.Popen[bytes], states: int) -> bool:
    """Whether a process is in one of `waitid`'s `states`: ended, or paused by somebody.

    An ended process is left for `_end`, so that `_kill` still finds what it has forked.
    """
    if not hasattr(os, "waitid"):  # macOS; there a paused one is replaced when it has not answered in time
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, states | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # until its end is known, no other process gets its id
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads its own session, so this ends all that it has forked
