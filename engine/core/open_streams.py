"""OpenStreams: where the outputs of the engine thread reach the streams of the requests that run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from ..devices.sampling import NO_TOKEN
from ..outputs import FinishReason
from ..scheduling.step import Finished
from .engine_core_outputs import EngineCoreOutputs
from .output_processor import OutputProcessor
from .stream import RequestStream

logger = logging.getLogger(__name__)

_TURN_S = 0.004  # of passing on, before the event loop does something else


class OpenStreams:
    """The streams that have not ended, by the keys of their choices. For the event loop, except `deliver`.

    `abort` tells the engine thread which sequences are not wanted any more. `on_failure` is called when the engine is
    dead, or outputs could not be passed on; it has to `fail` the streams.
    """

    def __init__(
        self,
        abort: Callable[[list[int]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._abort_sequences = abort
        self._on_failure = on_failure
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, tuple[OutputProcessor, RequestStream]] = {}
        self._arrived: deque[tuple[EngineCoreOutputs, Iterator[None]]] = deque()  # and not all passed on
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """How many choices have not ended."""
        return len(self._streams)

    def start(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Pass outputs on there from now on."""
        self._arrived.clear()  # for streams of another event loop
        self._event_loop = event_loop

    def open(self, choices: list[OutputProcessor]) -> RequestStream:
        """The stream of a new request."""
        stream = RequestStream(choices, self._abort)
        for choice in choices:
            self._streams[choice.key] = (choice, stream)
        self._idle.clear()
        return stream

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Pass outputs on. Called on the engine thread, and returns at once."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._receive, outputs)
        except RuntimeError:
            logger.debug("The event loop is closed, so outputs cannot be delivered")

    async def ended(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def abort_all(self) -> None:
        """Abort every stream."""
        for _, stream in list(self._streams.values()):
            stream.abort()

    def fail(self, error: str) -> None:
        """End every stream with an error."""
        for choice, stream in list(self._streams.values()):
            choice.finish(FinishReason.ERROR, error=error)
            stream.notify(choice)
        self._streams.clear()
        self._idle.set()

    def _receive(self, outputs: EngineCoreOutputs) -> None:
        self._arrived.append((outputs, self._distribute(outputs)))
        if len(self._arrived) == 1:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass on what has arrived, in its order, for a few milliseconds; the rest in the event loop's next turns."""
        until = time.perf_counter() + _TURN_S
        while self._arrived:
            outputs, parts = self._arrived[0]
            try:
                for _ in parts:
                    if time.perf_counter() > until:
                        asyncio.get_running_loop().call_soon(self._pass_on)
                        return
            except Exception as failure:  # streams that may have missed something must not wait for it
                logger.exception("The engine's outputs cannot be passed on")
                self._on_failure(failure)
            self._arrived.popleft()
            if outputs.passed_on is not None:
                outputs.passed_on()

    def _distribute(self, outputs: EngineCoreOutputs) -> Iterator[None]:
        """Passes outputs on, a choice's at a time."""
        if outputs.failure is not None:
            self._on_failure(outputs.failure)
            return
        streams, logprobs = self._streams, outputs.logprobs
        for start in outputs.started:
            if start.key in streams:
                choice = streams[start.key][0]
                choice.num_cached_tokens, choice.times = start.num_cached_tokens, start.times
        for key in outputs.preempted:
            if key in streams:
                streams[key][0].num_preemptions += 1
        for key, scored in outputs.scored:
            yield
            if key in streams:
                streams[key][0].push_prompt(scored)
        ends: dict[int, Finished] = {}  # of the last token of each sequence, by its place
        if outputs.finished:
            last = {key: i for i, key in enumerate(outputs.keys)}
            ends = {last[end.key]: end for end in outputs.finished if end.key in last}
        for i, (key, token) in enumerate(zip(outputs.keys, outputs.token_ids, strict=True)):
            yield
            entry = streams.get(key)
            if entry is None or token == NO_TOKEN:
                continue
            choice, stream = entry
            logprob = logprobs.get(i) if logprobs else None
            end = ends.get(i) if ends else None
            if end is None:
                if stream.push(choice, token, logprob):
                    self._abort([choice])
            elif choice.push(token, logprob, ends=end.reason is FinishReason.STOP and not end.is_complete):
                self._abort([choice])
                stream.notify(choice)
        for end in outputs.finished:
            yield
            entry = streams.pop(end.key, None)
            if entry is not None:
                choice, stream = entry
                if end.hypothesis is not None:
                    choice.push_all(end.hypothesis)
                choice.finish(end.reason, end.stop_reason, end.error)
                stream.notify(choice)
        if not streams:
            self._idle.set()

    def _abort(self, choices: list[OutputProcessor]) -> None:
        """Forget choices that ended on this side, and let the engine thread know."""
        for choice in choices:
            self._streams.pop(choice.key, None)
        self._abort_sequences([choice.key for choice in choices])
        if not self._streams:
            self._idle.set()
