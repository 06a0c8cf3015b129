"""The events of `/models/sse`, from the host and from downloads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from msgspec import to_builtins

from tidewheel.engine.hosting.units import State

from ..generation.frames import event
from ..protocol.router import ModelEvent
from .cards import status_of
from .hosted_models import HostedModels

if TYPE_CHECKING:
    from .pulls import Pull

_MOST_UNREAD = 1000
_QUIET_S = 5.0  # after which a comment is sent, which keeps the connection open, or shows that the client has gone


class _Box:
    """What one reader has not read yet. Of a model's progress it has the newest alone."""

    def __init__(self) -> None:
        self._changes: deque[bytes] = deque()
        self._progress: dict[str, bytes] = {}
        self._news = asyncio.Event()
        self.has_ended = False

    def put(self, name: str, frame: bytes, *, is_progress: bool) -> None:
        self._progress.pop(name, None)
        if is_progress:
            self._progress[name] = frame
        elif len(self._changes) < _MOST_UNREAD:
            self._changes.append(frame)
        else:
            self.has_ended = True  # it begins again with what /models says
        self._news.set()

    def end(self) -> None:
        self.has_ended = True
        self._news.set()

    async def take(self) -> bytes:
        """All that is there; a comment if there is nothing for long."""
        if not self._changes and not self._progress:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), _QUIET_S)
        frames = b"".join((*self._changes, *self._progress.values()))
        self._changes.clear()
        self._progress.clear()
        self._news.clear()
        return frames or b":\n\n"


class ModelEvents:
    """Tells all who listen of changes of models."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models
        self._boxes: WeakSet[_Box] = WeakSet()
        self._following: asyncio.Task[None] | None = None
        self._has_ended = False

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames of what happens from now on, until `end`."""
        box = _Box()
        self._boxes.add(box)
        if self._has_ended:
            box.end()
        elif self._following is None:
            self._following = asyncio.create_task(self._follow())
        yield b":\n\n"  # so that the client knows that it is heard
        while not box.has_ended:
            yield await box.take()

    def end(self) -> None:
        """End all streams."""
        self._has_ended = True
        if self._following is not None:
            self._following.cancel()
        for box in self._boxes:
            box.end()

    def pulled(self, pull: Pull) -> None:
        """A download has news."""
        if not pull.is_over:
            data = {pull.model: {"done": pull.completed, "total": pull.total}}
            self._put(ModelEvent(model=pull.model, event="download_progress", data=data), is_progress=True)
        elif pull.failure is None:
            self._put(ModelEvent(model=pull.model, event="download_finished"))
        else:
            data_of_failure = {"error": str(pull.failure)}
            self._put(ModelEvent(model=pull.model, event="download_failed", data=data_of_failure))

    def removed(self, name: str) -> None:
        """A model is gone."""
        self._put(ModelEvent(model=name, event="model_remove"))

    def reloaded(self) -> None:
        """The folder was looked at again."""
        self._put(ModelEvent(model="*", event="models_reload"))

    async def _follow(self) -> None:
        async for happened in self._models.host.events():
            if happened.state is State.UNLOADING:  # for which llama.cpp has no word
                continue
            for name in self._models.names_of(happened.name):
                status = to_builtins(status_of(happened))
                status["status"] = status.pop("value")
                self._put(
                    ModelEvent(model=name, event="model_status", data=status), is_progress=happened.progress is not None
                )

    def _put(self, happened: ModelEvent, *, is_progress: bool = False) -> None:
        frame = event(happened)
        for box in self._boxes:
            box.put(happened.model, frame, is_progress=is_progress)
