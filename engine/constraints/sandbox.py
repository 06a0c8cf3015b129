"""The grammar sandbox: tries each grammar in a separate process, which may crash, before the server compiles it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .sandbox_process import (
    ANSWER,
    COMMAND,
    COMPILE_STACK_BYTES,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_WALL_S,
    NOT_TRIED,
    READY,
    REQUEST,
    Outcome,
    receive,
)
from .vocabulary import TokenTexts

logger = logging.getLogger(__name__)

_START_S = 60.0  # for the process to start, on a slow machine
_END_S, _LOOK_S = 1.0, 0.01
_ENDED = "the process that test-compiles grammars has ended"
_GRACE_S = 5.0  # beyond its own limit, for a process to say how it ended
_MAX_ANSWER_BYTES = 64 * 2**20
_ENVIRONMENT = ("LD_LIBRARY_PATH",)  # what Python itself may need

_ENDS: Mapping[int, str] = {
    signal.SIGXCPU: f"takes more than {MAX_CPU_S} s of processor time",
    signal.SIGABRT: f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory",
    signal.SIGSEGV: f"takes more than {COMPILE_STACK_BYTES >> 20} MiB of stack: it is nested too deeply",
    signal.SIGBUS: f"takes more than {COMPILE_STACK_BYTES >> 20} MiB of stack: it is nested too deeply",
}


_KILLED = "the process that tried it was killed: the machine may be out of memory"
_NO_RESULT: Mapping[int, str] = {
    signal.SIGALRM: f"trying it took longer than {MAX_WALL_S} s: the machine is too busy, or the trial was paused",
    signal.SIGKILL: _KILLED,
    signal.SIGTERM: _KILLED,
}
"""Ends that do not say anything about the grammar: another trial may end otherwise."""


class GrammarError(Exception):
    """What is wrong with a grammar."""


class SandboxError(Exception):
    """No grammar can be tried at the moment."""


class _LostError(Exception):
    """A trial has ended without a result, for a reason that is not the grammar's."""


class SafeGrammar(NamedTuple):
    """A grammar that is safe to compile: llguidance's source of it, and about how many bytes it takes."""

    source: str
    size: int


class GrammarSandbox:
    """Tries grammars, several at once. The process starts with the first one, and again after a crash.

    May be used from several threads.
    """

    def __init__(self, texts: Callable[[], TokenTexts], special_ids: Callable[[], Mapping[str, int]]) -> None:
        """`texts` and `special_ids` return the vocabulary's, and are called when the process starts."""
        self._texts = texts
        self._special_ids = special_ids
        self._lock = threading.Lock()  # of the process
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process unless it runs. Raises SandboxError."""
        with self._lock:
            if self._is_closed:
                raise SandboxError("the server is shutting down")
            if self._process is not None and not _state(self._process, os.WEXITED | os.WSTOPPED):
                return
            self._end()
            try:
                self._start()
            except (OSError, EOFError) as error:
                self._end()
                if self._is_closed:
                    raise SandboxError("the server is shutting down") from error
                logger.exception("The process that test-compiles grammars does not start")
                raise SandboxError("this server cannot start the process that test-compiles grammars") from error

    def try_grammar(self, kind: str, text: str, on_slow: Callable[[], None]) -> SafeGrammar:
        """Try a grammar of a kind of StructuredOutput. `on_slow` is called if it takes long, and may raise.

        Raises GrammarError if it cannot be compiled, and SandboxError if this cannot be found out, even by a second
        trial.
        """
        with contextlib.suppress(_LostError):
            return self._try(kind, text, on_slow)
        try:
            return self._try(kind, text, on_slow)
        except _LostError as error:
            raise SandboxError(f"{error}; try again later") from error

    def _let_it_end(self, process: subprocess.Popen[bytes]) -> None:
        """It may have been ended from outside, which takes a moment."""
        last = time.monotonic() + _END_S
        while not _state(process, os.WEXITED) and time.monotonic() < last:
            time.sleep(_LOOK_S)

    def _try(self, kind: str, text: str, on_slow: Callable[[], None]) -> SafeGrammar:
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
                    self._let_it_end(process)
                    raise _LostError(_ENDED) from error
            try:
                return _tried(ours, kind, text, on_slow)
            except TimeoutError as error:  # each grammar has a shorter limit, so the process itself stands still
                _kill(process)
                raise _LostError("the process that test-compiles grammars did not answer") from error
            except (OSError, EOFError) as error:
                self._let_it_end(process)
                raise _LostError(_ENDED) from error

    def close(self) -> None:
        """End the process and everything that it tries. Those who wait get an error at once."""
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
                [sys.executable, "-I", "-c", COMMAND, str(theirs.fileno()), *path],
                # One arena: each thread's own would take address space from what a grammar may have.
                env={**environment, "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that it can be killed together with everything that it has forked
            )
        if self._is_closed:
            raise EOFError
        request = pickle.dumps((self._texts(), dict(self._special_ids())))
        ours.settimeout(_START_S)
        ours.sendall(REQUEST.pack(len(request)) + request)
        receive(ours.recv, len(READY))

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _tried(connection: socket.socket, kind: str, text: str, on_slow: Callable[[], None]) -> SafeGrammar:
    """The result of a grammar that is tried at the other end of a connection.

    Raises OSError and EOFError if the other end has gone.
    """
    deadline = time.monotonic() + MAX_WALL_S + _GRACE_S

    def recv(size: int) -> bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        return connection.recv(size)

    request = pickle.dumps((kind, text))
    connection.settimeout(MAX_WALL_S)
    connection.sendall(REQUEST.pack(len(request)) + request)
    while True:
        outcome, number, length = ANSWER.unpack(receive(recv, ANSWER.size))
        if length > _MAX_ANSWER_BYTES:
            raise EOFError
        answer = receive(recv, length).decode()
        if outcome != Outcome.SLOW:
            break
        on_slow()
    if outcome == Outcome.SOURCE:
        return SafeGrammar(answer, number)
    if outcome == Outcome.REFUSED:
        raise GrammarError(answer)
    raise _error_of(number)


def _error_of(status: int) -> Exception:
    """Why a trial has ended that was not refused, by its wait status."""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_TRIED:
        return _LostError("this machine has no threads left to try it")
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by in _NO_RESULT:
        return _LostError(_NO_RESULT[ended_by])
    return GrammarError(f"compiling it {_ENDS.get(ended_by, 'makes the grammar library fail')}")


def _state(process: subprocess.Popen[bytes], states: int) -> bool:
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
