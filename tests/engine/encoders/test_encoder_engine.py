"""The encoder thread: requests share batches, fail alone, and can be taken back."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager

import encoder_zoo as zoo
import numpy as np
import pytest
import uvicorn

from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.pooling import Floats
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import EngineDeadError, TidewheelError
from tidewheel.server.http.server import Server
from tidewheel.server.model_engines import ModelEngines

BROKEN, NOT_FINITE, FATAL = 11, 12, 13


class Gated(Embedder):
    """Runs when it is let; some tokens do harm."""

    entered: threading.Event
    gate: threading.Event
    batches: list[int]

    def pieces(self, task: Task, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[Floats]]:
        self.entered.set()
        self.gate.wait(20)
        self.batches.append(len(inputs))
        tokens = {token for item in inputs for token in item.token_ids}
        if BROKEN in tokens:
            raise RuntimeError("a broken token")
        if FATAL in tokens:
            raise SystemExit("a fatal token")
        results = yield from super().pieces(task, inputs)
        return [
            np.full_like(result, np.inf) if NOT_FINITE in item.token_ids else result
            for result, item in zip(results, inputs, strict=True)
        ]


@asynccontextmanager
async def running() -> AsyncIterator[tuple[EncoderEngine, Gated]]:
    """An engine with one embedding model, which waits until its gate is opened."""
    engine = load_encoders([str(zoo.folder("bert"))], ["it"])
    encoder = engine.encoders["it"]
    encoder.__class__ = Gated
    assert isinstance(encoder, Gated)
    encoder.entered, encoder.gate, encoder.batches = threading.Event(), threading.Event(), []
    engine.start()
    try:
        yield engine, encoder
    finally:
        encoder.gate.set()
        await engine.stop()


def inputs(*token_ids: int, length: int = 6) -> list[EncoderInput]:
    return [EncoderInput([token] * length) for token in token_ids]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - another thread makes it true
        await asyncio.sleep(0.001)


class Resting(Embedder):
    """Counts how often it has given memory back."""

    released = 0

    def release_scratch(self) -> None:
        super().release_scratch()
        Resting.released += 1


def test_memory_of_batches_is_given_back_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.engine.encoders.loop._REST_AFTER_S", 0.02)

    engine = load_encoders([str(zoo.native_folder("bert"))], ["it"])
    encoder = engine.encoders["it"]
    encoder.__class__ = Resting

    async def test() -> None:
        engine.start()
        try:
            rows = []
            for times in (1, 2):
                await until(lambda times=times: Resting.released == times)  # type: ignore[misc]
                rows.append(await engine.submit(encoder, "embed", inputs(20, 21)))
            await until(lambda: Resting.released == 3)
            await asyncio.sleep(0.05)
            assert Resting.released == 3  # once in each rest
            np.testing.assert_array_equal(*rows)
        finally:
            await engine.stop()

    run(test)


def test_requests_that_arrive_meanwhile_form_the_next_batch() -> None:
    async def test() -> None:
        async with running() as (engine, encoder):
            first = engine.submit(encoder, "embed", inputs(20))
            await until(encoder.entered.is_set)
            futures = [engine.submit(encoder, "embed", inputs(20 + i)) for i in range(8)]
            encoder.gate.set()
            rows = await asyncio.gather(first, *futures)
            assert encoder.batches == [1, 8]
            alone = [encoder.run("embed", inputs(20 + i)) for i in range(8)]
            np.testing.assert_allclose(np.concatenate(rows[1:]), np.concatenate(alone), rtol=1e-4, atol=1e-5)
            stats = engine.stats()["it"]
            assert (stats.batches_total, stats.tokens_total, stats.padding_total) == (2, 54, 0)

    run(test)


def test_an_input_that_fails_takes_no_other_request_with_it() -> None:
    async def test() -> None:
        async with running() as (engine, encoder):
            futures = [
                engine.submit(encoder, "embed", inputs(*tokens))
                for tokens in ((20,), (21, BROKEN), (22,), (NOT_FINITE,))
            ]
            encoder.gate.set()
            await asyncio.wait(futures)
            good, broken, also_good, not_finite = futures
            np.testing.assert_allclose(good.result(), encoder.run("embed", inputs(20)), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(also_good.result(), encoder.run("embed", inputs(22)), rtol=1e-4, atol=1e-5)
            assert isinstance(broken.exception(), RuntimeError)
            assert isinstance(not_finite.exception(), TidewheelError)
            assert engine.stats()["it"].inputs_waiting == 0

    run(test)


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def test() -> None:
        async with running() as (engine, encoder):
            first = engine.submit(encoder, "embed", inputs(20))
            await until(encoder.entered.is_set)
            gone = engine.submit(encoder, "embed", inputs(*[21] * 1000, length=60))
            last = engine.submit(encoder, "embed", inputs(22))
            gone.cancel()
            await asyncio.sleep(0)
            encoder.gate.set()
            await asyncio.gather(first, last)
            assert engine.stats()["it"].tokens_total == 12

    run(test)


def test_draining_waits_and_then_gives_up() -> None:
    async def test() -> None:
        async with running() as (engine, encoder):
            future = engine.submit(encoder, "embed", inputs(20))
            drain = asyncio.create_task(engine.drain(20))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shutting down"):
                engine.submit(encoder, "embed", inputs(20))
            encoder.gate.set()
            await drain
            assert future.done()
        async with running() as (engine, encoder):
            future = engine.submit(encoder, "embed", inputs(20))
            await engine.drain(0.01)
            with pytest.raises(EngineDeadError, match="stopped before"):
                await future

    run(test)


def test_where_nothing_runs_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running() as (engine, _):
            await engine.drain(0)

    run(test)
    assert not caplog.records


@pytest.mark.parametrize("forced", [False, True])
def test_a_server_does_not_end_under_the_thread(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    async def test() -> None:
        async with running() as (engine, _):
            server = Server(uvicorn.Config("none", log_config=None), ModelEngines(None, engine), 0)
            server.force_exit = forced
            with pytest.raises(SystemExit) as left:
                server.end()
            assert left.value.code == (130 if forced else 0)
        assert server.end() == 0

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    run(test)


def test_stopping_interrupts_a_batch() -> None:
    async def test() -> None:
        engine = load_encoders([str(zoo.folder("bert"))], ["it"])
        engine.start()
        encoder = engine.encoders["it"]
        future = engine.submit(encoder, "embed", inputs(*[20] * 5000, length=64))
        await until(lambda: engine.stats()["it"].batches_total > 0)
        await engine.stop()
        with pytest.raises(EngineDeadError):
            await future
        assert engine.stats()["it"].tokens_total < 5000 * 64  # it did not go on to the end
        await engine.stop()

    run(test)


def test_a_dead_thread_leaves_nobody_waiting() -> None:
    async def test() -> None:
        async with running() as (engine, encoder):
            futures = [engine.submit(encoder, "embed", inputs(token)) for token in (FATAL, 20)]
            encoder.gate.set()
            for future in futures:
                with pytest.raises(EngineDeadError, match="a fatal token"):
                    await future
            with pytest.raises(EngineDeadError, match="a fatal token"):
                engine.submit(encoder, "embed", inputs(20))
            assert isinstance(engine.failure, SystemExit)

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_only_the_encoder_thread_steps_back() -> None:
    async def test() -> None:
        before, others = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), threading.enumerate()
        async with running():
            (thread,) = [one for one in threading.enumerate() if one not in others]
            assert thread.native_id is not None
            await until(lambda: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) > before)
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before

    run(test)
