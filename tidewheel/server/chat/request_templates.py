"""Requests' own chat templates, which are programs: rendered one by one in a process that may be lost."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

from tidewheel.server.admission import EndRate, check_backlog, request_timeout
from tidewheel.server.chat.template_worker import COMMAND, MAX_CPU_S, MAX_TEXT, READY, REPLY, REQUEST, Outcome
from tidewheel.server.errors import ApiError, bad_request
from tidewheel.server.limits import AdmissionLimits

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_S = 10.0  # for one template; others have the processor meanwhile
_START_S = 60.0  # that the process may take to start, on a slow machine
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")  # what Python itself may need, and `strftime_now`
_MAX_REPLY_BYTES = 4 * MAX_TEXT


class RequestTemplates:
    """Renders templates that came with requests. The process starts with the first one, and again after it has ended.

    `run` is called on the event loop's thread, `render` by the work that `run` was given.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        # One, as there is one process. Its own, so that a template without an end holds up nothing but templates.
        self._thread = ThreadPoolExecutor(1, "request-templates")
        self._process: _TemplateProcess | None = None
        self._waiting = 0
        self._rate = EndRate()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may call `render`.

        Raises ApiError if too many wait already (429), or if it takes longer than a request may (504).
        """
        check_backlog(self._waiting, self._limits.max_queue, self._rate)
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            await asyncio.wait([future], timeout=self._limits.request_timeout_s)
            if not future.done():
                raise request_timeout()
            return future.result()
        finally:
            future.cancel()
            self._waiting -= 1
            self._rate.add(1)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text that a template writes.

        Raises ApiError: 400 for one that fails or takes too much of anything, 503 if nothing can be rendered.
        """
        if self._process is None or not self._process.is_alive:
            try:
                self._process = _TemplateProcess()
            except (OSError, EOFError) as error:
                logger.exception("The process for requests' templates does not start")
                raise ApiError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "chat_template: this server cannot start the process that renders it",
                    param="chat_template",
                ) from error
        return self._process.render(source, variables)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()


class _TemplateProcess:
    """A process that runs template_worker.py. Raises OSError or EOFError if it does not start."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        # Not this process's environment, which may hold API keys. Its files are closed to others as a matter of course.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        path = [os.path.abspath(entry) for entry in sys.path]
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", COMMAND, str(other.fileno()), *path],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
        try:
            self._receive(len(READY), time.monotonic() + _START_S)
        except (OSError, EOFError):
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def render(self, source: str, variables: dict[str, Any]) -> str:
        request = pickle.dumps((source, variables))
        deadline = time.monotonic() + _MAX_S
        try:
            self._socket.settimeout(_MAX_S)
            self._socket.sendall(REQUEST.pack(len(request)) + request)
            outcome, retires, size = REPLY.unpack(self._receive(REPLY.size, deadline))
            if size > _MAX_REPLY_BYTES:
                raise EOFError
            text = self._receive(size, deadline).decode()
        except TimeoutError:
            self.kill()
            raise _bad_template(f"rendering it takes longer than {_MAX_S:g} s") from None
        except (OSError, EOFError, ValueError):
            self.kill()
            if self._process.returncode == -signal.SIGXCPU:
                raise _bad_template(f"rendering it takes more than {MAX_CPU_S} s of processor time") from None
            raise _bad_template("it has ended the process that renders it") from None
        if retires:
            self.kill()
        if outcome == Outcome.TEXT:
            return text
        raise bad_request(text, "messages") if outcome == Outcome.FAILED else _bad_template(text)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, size: int, deadline: float) -> bytes:
        """So many bytes. Raises TimeoutError after the deadline, EOFError if the process has ended."""
        received = bytearray()
        while len(received) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._socket.recv(min(size - len(received), 2**20))
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)


def _bad_template(reason: str) -> ApiError:
    return bad_request(f"chat_template: {reason}", "chat_template")
