"""Pulls: downloads from the hub that clients ask for, each in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import IO

import msgspec

from tidewheel.engine.errors import BusyError, EngineDeadError, ModelError, TidewheelError, quoted
from tidewheel.engine.files.wording import reason

from ..own_command import own_command

logger = logging.getLogger(__name__)

_MOST = 2  # at a time: more would only share the network
_NICE = 10  # a process that downloads leaves the cores to the models
_END_S = 5.0  # for a process to delete what it has begun
_REPEAT_S = 1.0  # without news: that a client has gone is known when something is sent to it
_MAX_REASON = 4096  # bytes of a process' words
_SAYS = "tidewheel pull: "
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(:[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_HUBS = ("hf.co/", "huggingface.co/")


class PullFailedError(ModelError):
    """A download that has failed, or was ended."""


class _Line(msgspec.Struct):
    """A line of `tidewheel pull --json`."""

    completed: int = 0
    total: int = 0
    path: str | None = None


class Pull:
    """A download: `completed` of `total` bytes are here, and neither number ever shrinks. The total is 0 at first.

    `is_over` says that it has ended, well unless there is a `failure`.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.completed = self.total = 0
        self.is_over = False
        self.failure: TidewheelError | None = None
        self.holders = 0
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._news = asyncio.Event()

    def begin(self, task: asyncio.Task[None], on_over: Callable[[Pull], None]) -> None:
        """`task` is the download, which raises TidewheelError. `on_over` is called in the end."""

        def end(ended: asyncio.Task[None]) -> None:
            error = None if ended.cancelled() else ended.exception()
            if ended.cancelled():
                self.failure = PullFailedError(f"the download of {self.model} was cancelled")
            elif error is None:
                self.completed = self.total
            elif isinstance(error, TidewheelError):
                self.failure = error
            else:
                logger.error("the download of %s has failed", self.model, exc_info=error)
                self.failure = PullFailedError(f"the download of {self.model} has failed: the server's log says why")
            self.is_over = True
            on_over(self)

        self._task = task
        task.add_done_callback(end)

    def cancel(self) -> None:
        """Ends it soon."""
        if self._task is not None and not self._is_ending:
            self._is_ending = True
            self._task.cancel()

    async def ended(self) -> None:
        """Waits until it is over."""
        if self._task is not None:
            await asyncio.wait([self._task])

    @property
    def is_ending(self) -> bool:
        """Whether it was cancelled."""
        return self._is_ending

    def has_news(self) -> None:
        """Wakes all who follow it."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self) -> AsyncIterator[tuple[int, int]]:
        """`completed` and `total`, now and whenever they change, no more often than they are asked for. Repeated every
        second without a change.

        Raises TidewheelError if the download fails.
        """
        while not self.is_over:
            yield self.completed, self.total
            news = self._news
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), _REPEAT_S)
        if self.failure is not None:
            raise self.failure
        yield self.completed, self.total


class Pulls:
    """The downloads of a server into the hub's cache, or into `download_dir`.

    Who asks for a model that is being downloaded joins that download. It ends when the last of them has gone, and what
    was begun is deleted. `on_pulled` is awaited with the model's name and its path when it is here, and `on_change` is
    called with each pull that has news.
    """

    def __init__(
        self,
        download_dir: str | None,
        on_pulled: Callable[[str, str], Awaitable[None]],
        on_change: Callable[[Pull], None] = lambda pull: None,
    ) -> None:
        self._download_dir = download_dir
        self._on_pulled = on_pulled
        self._on_change = on_change
        self._pulls: dict[str, Pull] = {}
        self._threads = ThreadPoolExecutor(_MOST, "pull")
        self._is_stopped = False

    @property
    def running(self) -> Mapping[str, Pull]:
        """The downloads by the models' names."""
        return self._pulls

    @asynccontextmanager
    async def join(self, model: str) -> AsyncIterator[Pull]:
        """A model's download, which begins unless it runs. Raises ModelError for a name that is none of the hub's, and
        BusyError if too many run.
        """
        pull = await self._begun(model)
        pull.holders += 1
        try:
            yield pull
        finally:
            pull.holders -= 1
            if not pull.holders:
                pull.cancel()

    async def start(self, model: str) -> None:
        """Begins a download that goes on though nobody follows it. Raises what `join` raises."""
        (await self._begun(model)).holders += 1

    async def cancel(self, model: str) -> bool:
        """Ends a download for all who wait for it; False if there is none."""
        pull = self._pulls.get(model)
        if pull is None:
            return False
        pull.cancel()
        await pull.ended()
        return True

    async def stop(self) -> None:
        """Ends all of them; none can begin any more."""
        self._is_stopped = True
        await asyncio.gather(*map(self.cancel, [*self._pulls]))
        self._threads.shutdown(wait=False)

    async def _begun(self, model: str) -> Pull:
        check_id(model)
        while (pull := self._pulls.get(model)) is not None and pull.is_ending:
            await pull.ended()
        if self._is_stopped:
            raise EngineDeadError("the server is shutting down")
        if pull is None:
            if len(self._pulls) >= _MOST:
                raise BusyError(f"{_MOST} models are being downloaded, which is the most at a time: try again later")
            pull = self._pulls[model] = Pull(model)
            pull.begin(asyncio.create_task(self._run(pull)), self._over)
        return pull

    async def _run(self, pull: Pull) -> None:
        await self._on_pulled(pull.model, await self._download(pull))

    def _over(self, pull: Pull) -> None:
        del self._pulls[pull.model]
        self._changed(pull)

    async def _download(self, pull: Pull) -> str:
        """Returns the path of what it has downloaded."""
        folder = [] if self._download_dir is None else ["--download-dir", self._download_dir]
        command = own_command("pull", pull.model, "--json", *folder)
        with tempfile.TemporaryFile() as words:
            try:
                process = _started(command, words)
            except OSError as error:
                raise PullFailedError(f"the download of {pull.model} cannot be started: {reason(error)}") from error
            loop = asyncio.get_running_loop()

            def advance(line: _Line) -> None:
                pull.completed, pull.total = line.completed, line.total
                self._changed(pull)

            reading = loop.run_in_executor(
                self._threads, _read, process, lambda line: loop.call_soon_threadsafe(advance, line)
            )
            try:
                path = await asyncio.shield(reading)
            finally:
                await self._end(process)
            if process.returncode or path is None:
                raise PullFailedError(_last_words(words) or f"the download of {pull.model} has ended without a reason")
            return path

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """See to it that a process has ended, if need be by force."""
        loop = asyncio.get_running_loop()
        if process.poll() is None:
            process.terminate()
            try:
                await loop.run_in_executor(None, process.wait, _END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await loop.run_in_executor(None, process.wait)

    def _changed(self, pull: Pull) -> None:
        pull.has_news()
        self._on_change(pull)


def hub_id(name: str) -> str:
    """A model's name for clients of Ollama, which may begin with the hub's address and end in `:latest`, as an id."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(":latest")


def check_id(model: str) -> None:
    """Raises ModelError for what is no id of the hub."""
    if not _ID.fullmatch(model):
        raise ModelError(
            f"{quoted(model)} is no model of the hub: name one as owner/name, or owner/name:Q4_K_M for one of a "
            "repository's GGUF models"
        )


def _started(command: Sequence[str], words: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process that has begun to download. Raises OSError.

    Not by asyncio: some event loops run in the new process what libraries have registered for forks, with all locks as
    they were in this one.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=words,
        start_new_session=True,  # Ctrl-C is for the server, which ends its downloads in order
    )
    with suppress(OSError):  # it may have ended
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    return process


def _read(process: subprocess.Popen[bytes], advance: Callable[[_Line], object]) -> str | None:
    """In a thread of its own: reads a process to its end. Returns the path that it says at last."""
    path: str | None = None
    assert process.stdout is not None
    with process.stdout as lines:
        for text in lines:
            line = msgspec.json.decode(text, type=_Line)
            path = line.path
            if path is None:
                advance(line)
    process.wait()
    return path


def _last_words(file: IO[bytes]) -> str:
    """The error in what a process has said, however much that is."""
    file.seek(max(file.seek(0, os.SEEK_END) - _MAX_REASON, 0))
    return file.read().decode(errors="replace").rpartition(_SAYS)[2].strip()
