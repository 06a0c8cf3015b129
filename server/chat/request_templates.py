"""Chat templates that come with requests. They are programs, so separate processes render them."""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

from tidewheel.engine.errors import EngineDeadError

from ..errors import ApiError, bad_request
from ..fair_queue import Turns
from ..generation.backlog import EndRate, check_backlog, request_timeout
from ..http.clients import current_client
from ..http.limits import AdmissionLimits
from .template_worker import COMMAND, MAX_CPU_S, MAX_TEXT, READY, REPLY, REQUEST, Outcome

T = TypeVar("T")

logger = logging.getLogger(__name__)

# For one template, from its arrival: waiting and rendering, while other work uses the processor too.
_MAX_S = 10.0
_PROCESSES = 2  # so that one client's template without an end leaves one for the others
_START_S = 60.0  # that the process may take to start, on a slow machine
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")  # what Python itself may need, and `strftime_now`
_MAX_REPLY_BYTES = 4 * MAX_TEXT


class RequestTemplates:
    """Renders templates that came with requests, each client's one by one.

    A client has one process at a time, so a client that sends many templates waits for its own. A free process goes to
    the client whose last turn is the longest ago. Processes start when a template first needs them, and start again
    after they have ended. `run` is called on the event loop's thread, `render` by the work that `run` was given.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._turns = Turns(_PROCESSES)
        # One thread for each process. They do nothing else, so an endless template delays only other templates.
        self._threads = ThreadPoolExecutor(_PROCESSES, "request-templates")
        self._idle = [_Renderer() for _ in range(_PROCESSES)]
        self._renderers = tuple(self._idle)
        self._current = threading.local()  # the renderer of the work that a thread runs
        self._rate = EndRate()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may call `render`, for `current_client`.

        Raises ApiError if too many wait already (429), if the client's other templates take so long that it does not
        begin in time (503), or if it takes longer than a request may take (504). Raises EngineDeadError after `close`.
        """
        check_backlog(self._turns.waiting, self._limits.max_queue, self._rate)
        loop, limit_s = asyncio.get_running_loop(), self._limits.request_timeout_s
        arrived, client = loop.time(), current_client()
        try:
            await self._turns.take(client, _MAX_S if limit_s is None else min(_MAX_S, limit_s))
        except TimeoutError:
            if limit_s is not None and limit_s <= _MAX_S:
                raise request_timeout() from None
            raise _waited() from None
        waited_s = loop.time() - arrived
        renderer = self._idle.pop()
        future = loop.run_in_executor(self._threads, self._work, renderer, waited_s, work)
        future.add_done_callback(lambda done: self._end(client, renderer, done))
        await asyncio.wait([future], timeout=None if limit_s is None else max(limit_s - waited_s, 0))
        if not future.done():
            raise request_timeout()
        return future.result()

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text that a template writes.

        Raises ApiError: 400 if the template fails or exceeds a bound, 503 if no process can render. Raises
        EngineDeadError after `close`.
        """
        renderer: _Renderer = self._current.renderer
        return renderer.render(source, variables)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._turns.close(EngineDeadError("the server is shutting down"))
        self._threads.shutdown(wait=False, cancel_futures=True)
        for renderer in self._renderers:
            renderer.close()

    def _work(self, renderer: _Renderer, waited_s: float, work: Callable[[], T]) -> T:
        self._current.renderer = renderer
        renderer.begin_turn(waited_s)
        return work()

    def _end(self, client: str, renderer: _Renderer, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # the request may have gone
        self._idle.append(renderer)
        self._turns.give_back(client)
        self._rate.add(1)


class _Renderer:
    """Renders in a process, and replaces it when it ends. Used by one thread at a time; any thread may call `close`."""

    def __init__(self) -> None:
        self._process: _TemplateProcess | None = None
        self._is_closed = False
        self._waited_s = 0.0
        self._left_s = 0.0

    def begin_turn(self, waited_s: float) -> None:
        """All that is rendered from now on shares the time that is left after waiting."""
        self._waited_s, self._left_s = waited_s, _MAX_S - waited_s

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """See RequestTemplates."""
        if self._process is not None and self._process.is_alive:
            # The process may have been ended from outside, or by what an earlier template left behind.
            with contextlib.suppress(EOFError):
                return self._timed(self._process, source, variables)
        if self._is_closed:
            raise EngineDeadError("the server is shutting down")
        self._process = _start()
        try:
            return self._timed(self._process, source, variables)
        except EOFError:
            raise _bad_template("the process that renders it has ended") from None

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def _timed(self, process: _TemplateProcess, source: str, variables: dict[str, Any]) -> str:
        began = time.monotonic()  # the process's start does not count, which is the server's
        try:
            return process.render(source, variables, began + max(self._left_s, 0))
        except TimeoutError:
            if self._waited_s > _MAX_S / 2:
                raise _waited() from None
            raise _bad_template(f"rendering it takes longer than {_MAX_S - self._waited_s:.2g} s") from None
        finally:
            self._left_s -= time.monotonic() - began


def _start() -> _TemplateProcess:
    try:
        return _TemplateProcess()
    except (OSError, EOFError) as error:
        logger.exception("The process that renders requests' templates does not start")
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "chat_template: this server cannot start the process that renders it",
            param="chat_template",
        ) from error


class _TemplateProcess:
    """A process that runs template_worker.py. Raises OSError or EOFError if it does not start."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        # Not this process's environment, which may hold API keys. Open files are not inherited anyway.
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

    def render(self, source: str, variables: dict[str, Any], deadline: float) -> str:
        """See RequestTemplates. `deadline` is a time of the monotonic clock: TimeoutError is raised after it. Raises
        EOFError if the process has ended for another reason.
        """
        request = pickle.dumps((source, variables))
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            self._socket.sendall(REQUEST.pack(len(request)) + request)
            outcome, retires, size = REPLY.unpack(self._receive(REPLY.size, deadline))
            if size > _MAX_REPLY_BYTES:
                raise EOFError
            text = self._receive(size, deadline).decode()
        except TimeoutError:
            self.kill()
            raise
        except (OSError, EOFError, ValueError):
            self.kill()
            if self._process.returncode == -signal.SIGXCPU:
                raise _bad_template(f"rendering it takes more than {MAX_CPU_S} s of processor time") from None
            raise EOFError from None
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
        """Receives that many bytes. Raises TimeoutError after the deadline, EOFError if the process has ended."""
        received = bytearray()
        while len(received) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._socket.recv(min(size - len(received), 2**20))
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)


def _waited() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"chat_template: other templates of yours were rendered for {_MAX_S:g} s while this one waited for its turn; "
        "send fewer at once",
        param="chat_template",
        code="template_queue_timeout",
        headers={"retry-after": "1"},
    )


def _bad_template(reason: str) -> ApiError:
    return bad_request(f"chat_template: {reason}", "chat_template")
