"""The process of a sandbox: it prepares once, and then forks a process for each piece of work.

`Sandbox` runs it as `python -I -c COMMAND SOCKET PATH...`, where COMMAND calls `serve`. It reads what it needs to
prepare, and then gets a connection for each piece of work. Another process between the two waits for the one that does
the work, and reports how it ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

from ..machine.memory import address_space_bytes, limit_address_space

T = TypeVar("T")

_LOOK_S = 0.02
_STANDSTILL_S = 2  # by then a process's own timer has ended it, unless it is stopped
_NICE = 10
_SLOW_NICE = 19

MESSAGE = struct.Struct("!Q")  # the size of what follows
ANSWER = struct.Struct("!BQQ")  # an Outcome, a number that goes with it, the size of what follows
READY = b"\n"


class Outcome(IntEnum):
    """The kind of an answer. ENDED is the last one. A process that was killed has sent no RESULT or REFUSED before."""

    RESULT = 0  # what the number and the rest are is agreed on by both sides
    REFUSED = 1  # the text says what is wrong with what was sent
    ENDED = 2  # the number is the process's wait status
    SLOW = 3  # it has taken much processor time and still runs; another answer follows


def serve(
    prepare: Callable[[bytes], T],
    work: Callable[[socket.socket, T], object],
    *,
    wall_s: int,
    slow_cpu_s: float = float("inf"),
    niceness: int = _NICE,
) -> None:
    """Serve on the socket that the command line names, until its other end is closed.

    `prepare` makes what all pieces of work need of the first message. `work` reads a request from a connection, bounds
    its process (`bound_process`), and answers. After `slow_cpu_s` its process gets the lowest priority.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C, and then ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system then forgets the processes forked below by itself
    os.nice(niceness)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory runs out, the kernel then ends this process and not the server
    try:
        prepared = prepare(receive_message(connection))
    except EOFError:  # the server has ended meanwhile
        return
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
                _watch(socket.socket(fileno=files[0]), lambda own: work(own, prepared), wall_s, slow_cpu_s)
        os.close(files[0])


def bound_process(cpu_s: int, memory_bytes: int, wall_s: int) -> None:
    """Limit this process to as much more processor time and memory, and to as much time. It will be silent, too.

    Beyond these it gets SIGXCPU, MemoryError, SIGALRM.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    with contextlib.suppress(OSError):  # macOS does not say, and has no such limit
        limit_address_space(address_space_bytes() + memory_bytes)
    signal.setitimer(signal.ITIMER_REAL, wall_s)  # nothing handles the signal, so it ends the process
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # hides what libraries print when they crash
    os.close(silence)


def _watch(connection: socket.socket, work: Callable[[socket.socket], object], wall_s: int, slow_cpu_s: float) -> None:
    """Do a piece of work in a new process, report how that ended, and exit."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process = os.fork()
        if process == 0:
            _do(connection, work)
        status = _waited(process, connection, wall_s, slow_cpu_s)
        connection.sendall(ANSWER.pack(Outcome.ENDED, status, 0))
    finally:
        os._exit(0)


def _do(connection: socket.socket, work: Callable[[socket.socket], object]) -> None:
    code = 1
    try:
        work(connection)
        code = 0
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        os._exit(code)


def _waited(process: int, connection: socket.socket, wall_s: int, slow_cpu_s: float) -> int:
    """The wait status of a process after its end. It is killed if its answer is not wanted any more, or if somebody
    has paused it.
    """
    is_slow = False
    last = time.monotonic() + wall_s + _STANDSTILL_S
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(_LOOK_S)
        if _is_closed(connection) or time.monotonic() > last:
            os.kill(process, signal.SIGKILL)
        elif not is_slow and _cpu_seconds(process) > slow_cpu_s:
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
        return 0.0  # macOS, where all work counts as quick
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _let_others_first(process: int) -> None:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):  # each has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, int(thread), _SLOW_NICE)


def receive_message(connection: socket.socket) -> bytes:
    """What the other end has sent, after its size. Raises EOFError if it has closed."""
    return receive(connection.recv, *MESSAGE.unpack(receive(connection.recv, MESSAGE.size)))


def receive(recv: Callable[[int], bytes], size: int) -> bytes:
    """Receive exactly this many bytes. Raises EOFError if the other end has closed."""
    received = bytearray()
    while len(received) < size:
        piece = recv(min(size - len(received), 2**20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)
