"""Encoders between the steps of a chat model, on its threads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import encoder_zoo as zoo
import numpy as np
import pytest
from optional_packages import require_packages
from small_chat import small_chat

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.devices.cpu.executor import CpuExecutor
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.sharing import shared_device
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import EngineDeadError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.sampling_params import SamplingParams

pytest.importorskip("tidewheel._native")
require_packages("transformers")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    return small_chat(tmp_path_factory.mktemp("chat"))


def together(options: EngineOptions, *folders: Path) -> tuple[Engine, EncoderEngine]:
    """A chat model and encoders, named by their numbers, which are not started."""
    names = [str(number) for number in range(len(folders))]
    encoders = load_encoders([*map(str, folders)], names, device=shared_device(options))
    engine = load_engine(options)
    encoders.run_beside(engine)
    return engine, encoders


def has_one_thread(executor: Executor) -> bool:
    assert isinstance(executor, CpuExecutor)
    return executor.native.num_threads == 1


def inputs(count: int, length: int) -> list[EncoderInput]:
    return [EncoderInput([5 + (7 * i + j) % 60 for j in range(length)]) for i in range(count)]


def test_texts_and_answers_are_the_same_as_alone(options: EngineOptions) -> None:
    folder = zoo.native_folder("bert")
    alone = load_encoders([str(folder)], ["0"]).encoders["0"]
    texts = [inputs(40, 30), inputs(1, 12), inputs(3, 60)]
    wanted = [alone.run("embed", some) for some in texts]

    async def main() -> tuple[list[int], list[int]]:
        engine, encoders = together(options, folder)
        encoder = encoders.encoders["0"]
        engine.start()
        encoders.start()
        assert "tidewheel-encoders" not in {thread.name for thread in threading.enumerate()}

        async def answer() -> list[int]:
            sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
            stream = engine.submit(Request("r", tuple(range(3, 200)), sampling))
            return [token async for output in stream for token in output.token_ids]

        try:
            first = await answer()
            chat = asyncio.create_task(answer())
            for _ in range(3):
                results = await asyncio.gather(*(encoders.submit(encoder, "embed", some) for some in texts))
                for result, rows in zip(results, wanted, strict=True):
                    np.testing.assert_array_equal(result, rows)
            assert encoders.stats()["0"].tokens_total == 3 * (40 * 30 + 12 + 3 * 60)
            return first, await chat
        finally:
            await encoders.stop()
            await engine.stop()

    first, beside = asyncio.run(asyncio.wait_for(main(), 60))
    assert first == beside


def test_a_failure_and_the_end_of_the_chat_model_reach_whoever_waits(options: EngineOptions) -> None:
    async def main() -> None:
        engine, encoders = together(options, zoo.native_folder("bert"))
        encoder = encoders.encoders["0"]
        engine.start()
        encoders.start()
        future = encoders.submit(encoder, "embed", inputs(1, 12))
        await future

        def fail() -> None:
            raise SystemExit("the end")

        waiting = encoders.submit(encoder, "embed", inputs(500, 60))
        engine.call(fail)
        with pytest.raises(EngineDeadError, match="the end"):
            await waiting
        await encoders.stop()
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_graph_has_a_thread_of_its_own(options: EngineOptions) -> None:
    require_packages("onnxruntime")

    async def main() -> None:
        engine, encoders = together(options, zoo.folder("bert"), zoo.native_folder("bert"))
        engine.start()
        encoders.start()
        assert "tidewheel-encoders" in {thread.name for thread in threading.enumerate()}
        try:
            both = [encoders.submit(encoder, "embed", inputs(2, 12)) for encoder in encoders.encoders.values()]
            of_graph, native = await asyncio.gather(*both)
            np.testing.assert_allclose(of_graph, native, rtol=1e-3, atol=1e-4)
        finally:
            await encoders.stop()
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_encoder_with_fewer_threads_keeps_them(options: EngineOptions) -> None:
    """Its weights lie where its own threads read them."""
    encoder = load_encoders([str(zoo.native_folder("bert"))], ["0"], threads=1).encoders["0"]
    engine = load_engine(options)
    try:
        assert engine.lend_threads(encoder.share_threads) == engine.lend_threads(has_one_thread)
    finally:
        engine.close()


def test_only_a_model_on_this_machine_s_cpus_shares_its_threads(options: EngineOptions) -> None:
    assert shared_device(options) is not None
    assert shared_device(replace(options, device="torch")) is None
    assert shared_device(replace(options, pipeline=PipelineOptions(pipeline_parallel_size=2))) is None
