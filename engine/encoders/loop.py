"""EncoderLoop: the encoders' own thread. In a loop it takes in messages and runs a piece of work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ..machine.memory import release_free_memory
from ..machine.priority import lower_thread_priority
from .work import EncoderWork

if TYPE_CHECKING:
    from ..hosting.turns import Turn

logger = logging.getLogger(__name__)

_PIECE_S = 0.04  # a short text waits for so long, about
_SHARED_PIECE_S = 0.01  # the same where streams of other models wait
_REST_AFTER_S = 1.0


class EncoderLoop:
    """Runs encoders that cannot compute between the steps of a chat model. Other threads only leave messages."""

    def __init__(self, work: EncoderWork, *, has_priority: bool = False, turn: Turn | None = None) -> None:
        """Unless it `has_priority`, the thread gives way to a chat model's. With a `turn`, it waits for that."""
        self._work, self._has_priority, self._turn = work, has_priority, turn
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._rests = False
        self._thread = threading.Thread(target=self._run, name="tidewheel-encoders", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the thread, after the piece that runs."""
        self._inbox.put(function)

    def stop(self) -> None:
        """End the thread, even in the middle of a batch."""
        self._inbox.put(None)
        for encoder in self._work.counts:
            encoder.interrupt()

    def join(self) -> None:
        """Wait for the thread to end, if it was ever started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            if not self._has_priority:
                lower_thread_priority()
            while self._take_messages():
                self._run_piece()
        except BaseException as failure:  # after any error, no request may be left waiting
            logger.exception("The encoders have failed")
            ended_by = failure
        finally:
            self._work.close(ended_by)
            self._give_turn_back()

    def _run_piece(self) -> None:
        piece_s = _PIECE_S
        if self._turn is not None and self._turn.take():
            piece_s = _SHARED_PIECE_S
        self._work.run_piece(piece_s, nothing_runs=True)

    def _give_turn_back(self) -> None:
        if self._turn is not None:
            self._turn.give_back()

    def _take_messages(self) -> bool:
        """Handle all messages, and wait for one if there is nothing to run. False when told to stop."""
        waits = not self._work.is_waiting
        if waits:
            self._give_turn_back()
        while waits or not self._inbox.empty():
            message = self._next_message() if waits else self._inbox.get()
            if message is None:
                return False
            message()
            waits = False
        return True

    def _next_message(self) -> Callable[[], None] | None:
        """Wait for a message. After a while without one, memory that only batches need goes back to the system."""
        if not self._rests:
            try:
                return self._inbox.get(timeout=_REST_AFTER_S)
            except Empty:
                for encoder in self._work.counts:
                    encoder.release_scratch()
                release_free_memory()
                self._rests = True
        message = self._inbox.get()
        self._rests = False
        return message
