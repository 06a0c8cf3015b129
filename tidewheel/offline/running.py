"""RunningModel: a loaded model with the thread that it runs in, for callers in any thread."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidewheel.engine.errors import TidewheelError

from .loop_thread import LoopThread
from .model import OfflineModel
from .options import OfflineOptions

T = TypeVar("T")


class RunningModel:
    """A model in this process. Methods may be called from any thread. Who forgets it frees its threads and memory."""

    def __init__(self, options: OfflineOptions) -> None:
        """Load it. Raises TidewheelError, saying what to change."""
        self.model = loaded = OfflineModel(options)
        self._thread = thread = LoopThread()
        self._close = weakref.finalize(self, _close, thread, loaded)
        thread.loop.call_soon_threadsafe(loaded.start)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on the event loop. Raises TidewheelError after `close`."""
        if not self._close.alive:
            work.close()
            raise TidewheelError("this LLM has been shut down")
        return self._thread.run(work)

    def close(self) -> None:
        """End what runs, and free threads and memory. Calling it twice is allowed."""
        self._close()


def _close(thread: LoopThread, model: OfflineModel) -> None:
    try:
        thread.run(model.stop())
    except RuntimeError:  # the interpreter ends, and starts no thread to wait in
        model.close()
    thread.close()
