"""Helper: a process that makes something in place of this one, which would stand still meanwhile, and answers with it.

On each of two connections, a thread of the process answers requests until this end is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ..machine.priority import lower_thread_priority
from .process import receive_message
from .sandbox import send_message

T = TypeVar("T")

_COMMAND = "import sys; sys.path[:] = sys.argv[5:]; from tidewheel.engine.sandboxing.helper import main; main()"
_LONGEST_MAKE_S = 60.0


class Helper:
    """The process, and two connections: short requests need not wait for long ones."""

    def __init__(self, module: str, argument: str) -> None:
        """It makes what `make` of that module makes of the argument, tells what `tell` says of it, and then answers as
        `answer` does.

        Raises OSError if it does not start.
        """
        self.is_closed = False
        pairs = [socket.socketpair() for _ in range(2)]
        self._connections = [ours for ours, _ in pairs]
        self._locks = [threading.Lock() for _ in pairs]
        numbers = [theirs.fileno() for _, theirs in pairs]
        command = [*map(str, numbers), module, argument, *map(os.path.abspath, sys.path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _COMMAND, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what is wrong with files is said by this process, which then reads them
                pass_fds=numbers,
                start_new_session=True,  # the server alone gets the terminal's signals
            )
        except OSError:
            self._hang_up()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    def receive(self) -> bytes:
        """A message of what it tells first. Raises OSError and EOFError if it has ended, or takes too long."""
        self._connections[0].settimeout(_LONGEST_MAKE_S)
        return receive_message(self._connections[0])

    def ask(self, request: bytes, longest_s: float, *, is_long: bool) -> bytes:
        """Its answer. Raises OSError and EOFError if it is gone, or takes too long."""
        connection = self._connections[is_long]
        with self._locks[is_long]:
            connection.settimeout(longest_s)
            send_message(connection, request)
            return receive_message(connection)

    def close(self) -> None:
        """End it. Those who wait for an answer get an error. Calling it twice is allowed."""
        self.is_closed = True
        self._process.kill()
        self._process.wait()
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes those that wait
            connection.close()


def main() -> None:
    """The process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C, and then ends this process
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]]
    module = importlib.import_module(sys.argv[3])
    _serve(connections, lambda: module.make(sys.argv[4]), module.tell, module.answer)


def _serve(
    connections: Sequence[socket.socket],
    make: Callable[[], T],
    tell: Callable[[T], Iterable[bytes]],
    answer: Callable[[T, bytes], bytes],
) -> None:
    made, is_made = list[T](), threading.Event()

    def serve(connection: socket.socket) -> None:
        is_made.wait()
        with contextlib.suppress(EOFError, OSError):
            while True:
                send_message(connection, answer(made[0], receive_message(connection)))

    # They have the priority of what answers. To make it has less.
    threads = [threading.Thread(target=serve, args=(connection,), daemon=True) for connection in connections]
    for thread in threads:
        thread.start()
    lower_thread_priority()
    made.append(make())
    for message in tell(made[0]):
        send_message(connections[0], message)
    is_made.set()
    for thread in threads:
        thread.join()
