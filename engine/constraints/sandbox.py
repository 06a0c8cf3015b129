"""The grammar sandbox: tries each grammar in a separate process, which may crash, before the server compiles it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..sandboxing.process import Outcome
from ..sandboxing.sandbox import LostError, Sandbox, ask
from .sandbox_process import (
    COMMAND,
    COMPILE_STACK_BYTES,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_WALL_S,
    NOT_TRIED,
)
from .vocabulary import TokenTexts

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
        self._sandbox = Sandbox(
            lambda: COMMAND, lambda: pickle.dumps((texts(), dict(special_ids()))), "test-compiles grammars"
        )

    def start(self) -> None:
        """Start the process unless it runs. Raises SandboxError."""
        self._sandbox.start()

    def try_grammar(self, kind: str, text: str, on_slow: Callable[[], None]) -> SafeGrammar:
        """Try a grammar of a kind of StructuredOutput. `on_slow` is called if it takes long, and may raise.

        Raises GrammarError if it cannot be compiled, and SandboxError if this cannot be found out, even by a second
        trial.
        """
        return self._sandbox.run(lambda connection: _tried(connection, kind, text, on_slow))

    def close(self) -> None:
        """End the process and everything that it tries. Those who wait get an error at once."""
        self._sandbox.close()


def _tried(connection: socket.socket, kind: str, text: str, on_slow: Callable[[], None]) -> SafeGrammar:
    answer = ask(connection, pickle.dumps((kind, text)), MAX_WALL_S, on_slow)
    if answer.outcome == Outcome.RESULT:
        return SafeGrammar(answer.content.decode(), answer.number)
    if answer.outcome == Outcome.REFUSED:
        raise GrammarError(answer.content.decode())
    raise _error_of(answer.number)


def _error_of(status: int) -> Exception:
    """Why a trial has ended that was not refused, by its wait status."""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_TRIED:
        return LostError("this machine has no threads left to try it")
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by in _NO_RESULT:
        return LostError(_NO_RESULT[ended_by])
    return GrammarError(f"compiling it {_ENDS.get(ended_by, 'makes the grammar library fail')}")
