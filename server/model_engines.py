"""ModelEngines: what computes one model, and the encoders beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidewheel.engine.encoders.engine import EncoderEngine

if TYPE_CHECKING:
    from tidewheel.engine.core.engine import Engine


class ModelEngines:
    """The engines of one model, which start and stop together. See `Engines` of http/server.py."""

    def __init__(self, chat: Engine | None, encoders: EncoderEngine, log_stats_interval_s: float | None = None) -> None:
        """`chat` is None for encoders alone. The chat model's throughput is logged every `log_stats_interval_s`."""
        self.chat = chat
        self.encoders = encoders
        self._log_stats_interval_s = log_stats_interval_s
        self._throughput: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start their threads. Outputs are delivered on the running event loop."""
        if self.chat is not None:
            self.encoders.run_beside(self.chat)
            self.chat.start()
        self.encoders.start()
        if self.chat is not None and self._log_stats_interval_s is not None:
            from .telemetry.throughput import log_throughput

            self._throughput = asyncio.create_task(log_throughput(self.chat, self._log_stats_interval_s))

    async def stop(self) -> None:
        """Abort everything, end the threads and free the weights."""
        if self._throughput is not None:
            self._throughput.cancel()
        await self.encoders.stop()
        if self.chat is not None:
            await self.chat.stop()

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended an engine, if one has."""
        return next((engine.failure for engine in self._all if engine.failure is not None), None)

    @property
    def is_writing(self) -> bool:
        """See Executor."""
        return any(engine.is_writing for engine in self._all)

    @property
    def is_alive(self) -> bool:
        """Whether a thread of theirs runs."""
        return any(engine.is_alive for engine in self._all)

    @property
    def has_stalled(self) -> bool:
        """Whether a step took longer than --step-timeout."""
        return self.chat is not None and self.chat.stats().stalled_steps_total > 0

    def warm_up(self) -> None:
        """Prepare for what requests may ask for, unless some are there."""
        if self.chat is not None:
            self.chat.warm_up()
        self.encoders.warm_up()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is generated."""
        return self.chat is None or self.chat.is_idle

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those that run; after `timeout_s` abort the rest."""
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self._all))

    @property
    def _all(self) -> Sequence[Engine | EncoderEngine]:
        return [self.encoders] if self.chat is None else [self.chat, self.encoders]
