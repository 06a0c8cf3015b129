"""The process that tries grammars. A grammar may crash it without harm to the server.

sandbox.py runs it as `python -I -c COMMAND SOCKET PATH...`. It reads the vocabulary, and then gets a connection for
each grammar. For each connection it forks a process that does everything that the server will do with the grammar,
under limits of time, memory and stack, and answers. Another process between the two waits for it and reports how it
ended.

The server's threads have more stack than this. So a grammar that passes here is safe there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from ..machine.memory import address_space_bytes, heap_bytes
from .source import grammar_source, located, matcher_error
from .vocabulary import make_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

MAX_CPU_S = 2
MAX_WALL_S = 10
MAX_MEMORY_BYTES = 256 * 2**20  # while it is compiled
MAX_COMPILED_BYTES = 64 * 2**20
COMPILE_STACK_BYTES = 4 * 2**20
_USE_STACK_BYTES = 512 * 2**10  # stack for making masks, and for copying and freeing matchers
SLOW_CPU_S = 0.1
_LOOK_S = 0.02
_STANDSTILL_S = MAX_WALL_S + 2  # by then its own timer has ended a process, unless it is stopped
_NICE = 10
_SLOW_NICE = 19
_WALKS = 3
_STEPS = 12
_FIRST_STEPS = 2  # a failure within the first two tokens is the grammar's fault, even if other tokens would work

REQUEST = struct.Struct("!Q")  # the size of what follows: pickled TokenTexts and special ids, or kind and text
ANSWER = struct.Struct("!BQQ")  # an Outcome, a number that goes with it, the size of the UTF-8 text that follows
READY = b"\n"
NOT_TRIED = 2  # the exit status of a trial that could not begin
COMMAND = (
    "import sys; sys.path[:] = sys.argv[2:]; from tidewheel.engine.constraints.sandbox_process import main; main()"
)


class Outcome(IntEnum):
    """The kind of an answer. ENDED is the last one. If the process was killed, no SOURCE or REFUSED comes before it."""

    SOURCE = 0  # the text is llguidance's source of the grammar, the number the bytes that it takes when compiled
    REFUSED = 1  # the text says what is wrong with the grammar
    ENDED = 2  # the number is the process's wait status
    SLOW = 3  # it has taken SLOW_CPU_S and still runs; another answer follows


def parser_limits() -> LLParserLimits:
    """llguidance's limits for a grammar, here and in the server."""
    from llguidance import LLParserLimits

    # Where a grammar is ambiguous, the time of a mask grows with the square of its items: to over a second for the
    # 50,000 that llguidance allows. A schema of 400 optional properties takes less than 10,000.
    return LLParserLimits(step_max_items=20_000, verbose_errors=False)


def main() -> None:
    """Serve on the socket that the command line names, until its other end is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C, and then ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system then forgets the processes forked below by itself
    os.nice(_NICE)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory runs out, the kernel then ends this process and not the server
    try:
        texts, special_ids = _receive(connection)
    except EOFError:  # the server has ended meanwhile
        return
    vocabulary = make_vocabulary(texts)
    del texts
    gc.collect()
    gc.freeze()
    connection.sendall(READY)
    while True:
        _, files, _, _ = socket.recv_fds(connection, 1, 1)
        if not files:
            os.killpg(0, signal.SIGKILL)  # the server is gone, and nothing waits for what still runs
        with contextlib.suppress(OSError):  # too many processes: closing the connection tells the server
            if os.fork() == 0:
                connection.close()
                _watch(socket.socket(fileno=files[0]), vocabulary, special_ids)
        os.close(files[0])


def _watch(connection: socket.socket, vocabulary: LLTokenizer, special_ids: Mapping[str, int]) -> None:
    """Try a grammar in a new process, report how that ended, and exit."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process = os.fork()
        if process == 0:
            _try(connection, vocabulary, special_ids)
        status = _waited(process, connection)
        connection.sendall(ANSWER.pack(Outcome.ENDED, status, 0))
    finally:
        os._exit(0)


def _waited(process: int, connection: socket.socket) -> int:
    """The wait status of a process after its end. It is killed if its answer is not wanted any more, or if somebody
    has paused it.
    """
    is_slow = False
    last = time.monotonic() + _STANDSTILL_S
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(_LOOK_S)
        if _is_closed(connection) or time.monotonic() > last:
            os.kill(process, signal.SIGKILL)
        elif not is_slow and _cpu_seconds(process) > SLOW_CPU_S:
            is_slow = True
            _let_others_first(process)
            connection.sendall(ANSWER.pack(Outcome.SLOW, 0, 0))


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _cpu_seconds(process: int) -> float:
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0  # macOS, where all grammars count as quick
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _let_others_first(process: int) -> None:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):  # each has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, int(thread), _SLOW_NICE)


def _try(connection: socket.socket, vocabulary: LLTokenizer, special_ids: Mapping[str, int]) -> None:
    code = 1
    try:
        kind, text = _receive(connection)
        _bound_process()
        outcome, size, answer = _tried(kind, text, vocabulary, special_ids)
        encoded = answer.encode(errors="replace")
        connection.sendall(ANSWER.pack(outcome, size, len(encoded)) + encoded)
        code = 0
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)  # as llguidance does
    finally:
        os._exit(code)


def _bound_process() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
    with contextlib.suppress(OSError):  # macOS does not say, and has no such limit
        most = address_space_bytes() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)  # nothing handles the signal, so it ends the process
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # hides what llguidance prints when it crashes


def _tried(kind: str, text: str, vocabulary: LLTokenizer, special_ids: Mapping[str, int]) -> tuple[Outcome, int, str]:
    before = heap_bytes()
    matchers: list[LLMatcher] = []

    def compiled() -> tuple[Outcome, str]:
        from llguidance import LLMatcher

        try:
            source = grammar_source(kind, text, special_ids)
        except (ValueError, RecursionError) as error:
            return Outcome.REFUSED, str(error)
        matchers.append(LLMatcher(vocabulary, source, log_level=0, limits=parser_limits()))
        message = matcher_error(matchers[0])
        return (Outcome.SOURCE, source) if message is None else (Outcome.REFUSED, located(kind, text, message))

    def used() -> tuple[str | None, int]:
        message = _walk(matchers[0])
        size = max(heap_bytes() - before, 0)
        matchers.clear()
        return message, size

    outcome, answer = _on_stack(COMPILE_STACK_BYTES, compiled)
    if outcome == Outcome.REFUSED:
        return outcome, 0, answer
    message, size = _on_stack(_USE_STACK_BYTES, used)
    if message is None and size > MAX_COMPILED_BYTES:
        message = f"its compiled form takes {size >> 20} MiB; the limit is {MAX_COMPILED_BYTES >> 20} MiB"
    return (outcome, size, answer) if message is None else (Outcome.REFUSED, 0, message)


def _walk(matcher: LLMatcher) -> str | None:
    """Use a matcher as sequences will. Returns the error if it fails at once, or soon with any choice of tokens."""
    matcher.compute_bitmask()
    if (message := matcher_error(matcher)) is not None:
        return message
    messages: list[str | None] = []
    for seed in range(_WALKS):
        steps, message = _walked(matcher.deep_copy(), random.Random(seed))
        messages.append(message)
        if steps <= _FIRST_STEPS and message is not None:
            return message
    return messages[0] if all(messages) else None


def _walked(matcher: LLMatcher, chosen: random.Random) -> tuple[int, str | None]:
    """How many allowed tokens the matcher accepted in a row, and the error that then stopped it, if any."""
    for step in range(_STEPS):
        forced = matcher.compute_ff_tokens()
        matcher.deep_copy().validate_tokens(forced)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped() or not mask:
            return step, matcher_error(matcher)
        start = chosen.randrange(mask.bit_length())
        rest = mask >> start  # the first token that is allowed from there on
        matcher.consume_token(start + (rest & -rest).bit_length() - 1)
    return _STEPS, matcher_error(matcher)


def _on_stack(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, run on a stack of `size` bytes. If that is too small, the process crashes."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    threading.stack_size(size)
    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError:  # the machine has no more threads, which says nothing of the grammar
        os._exit(NOT_TRIED)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _receive(connection: socket.socket) -> Any:
    return pickle.loads(receive(connection.recv, *REQUEST.unpack(receive(connection.recv, REQUEST.size))))


def receive(recv: Callable[[int], bytes], size: int) -> bytes:
    """Receive exactly this many bytes. Raises EOFError if the other end has closed."""
    received = bytearray()
    while len(received) < size:
        piece = recv(min(size - len(received), 2**20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)
