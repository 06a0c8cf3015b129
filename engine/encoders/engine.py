"""EncoderEngine: what the server talks to. `submit` inputs, await their results."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from ..errors import EngineDeadError, ModelError
from ..start_log import start_logger
from .batching import Job
from .encoder import Encoder
from .loop import EncoderLoop
from .pooling import Floats
from .tasks import Task
from .tokenization import EncoderInput, EncoderTokenizer
from .work import EncoderWork

if TYPE_CHECKING:
    from ..core.engine import Engine
    from ..hosting.turns import Turn

logger = logging.getLogger(__name__)

Results = list[Floats]


class EncoderStats(Struct, frozen=True):
    """Figures of one encoder. Totals count from the start."""

    inputs_waiting: int
    batches_total: int
    tokens_total: int
    padding_total: int  # tokens of padding that were computed


class EncoderEngine:
    """Runs encoders, by their names in the API. Call everything except `stats` on the event loop's thread.

    Those that can compute between the steps of a chat model, on its threads. One thread of low priority runs all
    others, so that together they take no more of the machine than one alone.
    """

    def __init__(self, encoders: Sequence[Encoder] = (), *, has_priority: bool = False) -> None:
        """The thread has a lower priority than others, unless it `has_priority`: there is no chat model."""
        self.failure: BaseException | None = None
        self.encoders: Mapping[str, Encoder] = {encoder.name: encoder for encoder in encoders}
        self._alone = EncoderWork(encoders, self._post)
        self._encoder_loop = EncoderLoop(self._alone, has_priority=has_priority)
        self._beside = EncoderWork((), self._post)
        self._call_beside: Callable[[Callable[[], None]], None] | None = None
        self._loop_in_turns: EncoderLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[Job, asyncio.Future[Results]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: str | None = None
        self._settling: threading.Thread | None = None

    def run_beside(self, engine: Engine) -> None:
        """Let encoders compute between the steps of a chat model where they can. Neither has been started."""
        sharing = [encoder for encoder in self.encoders.values() if engine.lend_threads(encoder.share_threads)]
        if not sharing:
            return
        self._beside = self._taken(sharing)
        self._call_beside = engine.call
        engine.add_side_work(self._beside)
        names = ", ".join(encoder.name for encoder in sharing)
        start_logger.info("Between the steps of the chat model, on its threads, run: %s", names)

    def run_in_turns(self, threads: object, turn: Turn) -> None:
        """Let encoders compute with these threads where they can, in turns with models that use them too.

        It has not been started.
        """
        sharing = [encoder for encoder in self.encoders.values() if encoder.use_threads(threads)]
        if not sharing:
            return
        self._beside = self._taken(sharing)
        self._loop_in_turns = EncoderLoop(self._beside, has_priority=True, turn=turn)
        self._call_beside = self._loop_in_turns.call

    def start(self) -> None:
        """Start the thread, if there are encoders for it. Results are delivered on the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        if self._alone.counts:
            self._encoder_loop.start()
        if self._loop_in_turns is not None:
            self._loop_in_turns.start()

    def submit(
        self, encoder: Encoder, task: Task, inputs: Sequence[EncoderInput], client: str = ""
    ) -> asyncio.Future[Results]:
        """Queue at least one input. All must have passed `encoder.check`. Requests of different clients take turns.

        `task` is one of the encoder's. The future's result has a result for each input. Cancelling it removes them from
        the queue. Raises EngineDeadError if nothing can run.
        """
        if self._refusal is not None or self._event_loop is None:
            raise EngineDeadError(self._refusal or "the encoders have not been started")
        job = Job(encoder, task, inputs, client)
        future: asyncio.Future[Results] = self._event_loop.create_future()
        self._futures[job] = future
        self._idle.clear()
        future.add_done_callback(lambda done: self._forget(job, done))
        work, call = self._runner(encoder)
        call(partial(work.add, job))
        return future

    def warm_up(self) -> None:
        """Make lent tokenizers here, in a thread, unless inputs are there."""
        lent = [encoder.tokenizer for encoder in self.encoders.values() if encoder.tokenizer.is_lent]
        if lent and self._refusal is None and self._idle.is_set() and self._settling is None:
            self._settling = threading.Thread(target=_settle, args=(lent,), name="tokenizer", daemon=True)
            self._settling.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new inputs and wait for the others. After `timeout_s`, fail the rest."""
        self._refusal = self._refusal or "the server is shutting down"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            if self._futures:  # without time, the wait fails even if there is nothing to wait for
                logger.warning(
                    "Aborting %d embedding requests that did not finish in %g s", len(self._futures), timeout_s
                )
                self._fail_all("the server stopped before the answer was complete")

    async def stop(self) -> None:
        """Fail everything and end the thread. Calling it twice is allowed."""
        self._refusal = self._refusal or "the encoders have been stopped"
        self._fail_all(self._refusal)
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """End the thread and free the weights, where no event loop runs any more because the program ends."""
        if self._call_beside is not None:
            self._call_beside(self._beside.close)
        for loop in self._own_loops:
            loop.stop()
            loop.join()
        for encoder in self.encoders.values():
            encoder.close()

    @property
    def is_writing(self) -> bool:
        """See Executor."""
        return any(encoder.is_writing for encoder in self.encoders.values())

    @property
    def is_alive(self) -> bool:
        """Whether a thread of the encoders' own runs."""
        return any(loop.is_alive for loop in self._own_loops)

    @property
    def backlog(self) -> int:
        """How many inputs were submitted and not computed yet."""
        return sum(self.backlogs().values())

    def backlogs(self) -> Mapping[str, int]:
        """The same by clients, of those that have any."""
        backlogs: Counter[str] = Counter()
        for job in self._futures:
            if job.num_unfinished:
                backlogs[job.client] += job.num_unfinished
        return backlogs

    def stats(self) -> Mapping[str, EncoderStats]:
        """Figures for metrics, by the encoders' names. May be called from any thread."""
        return {name: self._stats(encoder) for name, encoder in self.encoders.items()}

    @property
    def _own_loops(self) -> list[EncoderLoop]:
        return [loop for loop in (self._encoder_loop, self._loop_in_turns) if loop is not None]

    def _taken(self, sharing: Sequence[Encoder]) -> EncoderWork:
        """The work of these encoders, which the low thread does not do then."""
        for encoder in sharing:
            del self._alone.counts[encoder]
        return EncoderWork(sharing, self._post)

    def _stats(self, encoder: Encoder) -> EncoderStats:
        work, _ = self._runner(encoder)
        counts = work.counts[encoder]
        return EncoderStats(work.queue.num_waiting(encoder), counts.batches, counts.tokens, counts.padding)

    def _runner(self, encoder: Encoder) -> tuple[EncoderWork, Callable[[Callable[[], None]], None]]:
        """What runs an encoder, and what calls functions on its thread."""
        if self._call_beside is not None and encoder in self._beside.counts:
            return self._beside, self._call_beside
        return self._alone, self._encoder_loop.call

    def _abort(self, job: Job) -> None:
        work, call = self._runner(job.encoder)
        call(partial(work.abort, job))

    def _post(self, ended: list[Job], death: BaseException | None) -> None:
        """Pass finished jobs from the thread that ran them to the event loop."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._distribute, ended, death)
        except RuntimeError:
            logger.debug("The event loop is closed, so outputs cannot be delivered")

    def _distribute(self, ended: list[Job], death: BaseException | None) -> None:
        for job in ended:
            future = self._futures.get(job)
            if future is None or future.done():
                continue  # nothing waits for it any more
            if job.failure is None:
                future.set_result(job.results)
            else:
                future.set_exception(job.failure)
        if death is not None:
            self.failure = death
            self._refusal = f"the encoders have failed: {death}"
            self._fail_all(self._refusal)

    def _forget(self, job: Job, future: asyncio.Future[Results]) -> None:
        del self._futures[job]
        if future.cancelled():
            self._abort(job)
        if not self._futures:
            self._idle.set()

    def _fail_all(self, reason: str) -> None:
        for job, future in self._futures.items():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
                self._abort(job)


def _settle(tokenizers: Sequence[EncoderTokenizer]) -> None:
    for tokenizer in tokenizers:
        try:
            tokenizer.settle()
        except ModelError as error:
            logger.warning("Another process goes on encoding texts: %s", error)
