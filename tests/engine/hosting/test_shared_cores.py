"""Several models on the same cores: each gives what it gives alone, and all have the same threads."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import encoder_zoo as zoo
import numpy as np
import pytest
from optional_packages import require_packages
from small_chat import small_chat
from waiting import wait_until

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.devices.cpu.executor import CpuExecutor
from tidewheel.engine.encoders.load import load_encoders, load_model_alone, needs_of_model
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import ModelError
from tidewheel.engine.hosting.cores import SharedCores
from tidewheel.engine.hosting.units import STAGES, Progress
from tidewheel.engine.loading.load import EngineLoad, load_engine
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.options import SpeculativeOptions

pytest.importorskip("tidewheel._native")
require_packages("transformers")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    return small_chat(tmp_path_factory.mktemp("chat"))


def loaded(options: EngineOptions, cores: SharedCores) -> Engine:
    with EngineLoad(options, cores=cores) as load:
        return load.engine()


async def answer(engine: Engine, num_prompt: int, num_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=num_prompt, ignore_eos=True)
    stream = engine.submit(Request("r", tuple(3 + i % 300 for i in range(num_prompt)), sampling))
    return [token async for output in stream for token in output.token_ids]


async def answers(engine: Engine) -> list[list[int]]:
    return list(await asyncio.gather(*(answer(engine, 40 + 311 * i, 60) for i in range(4))))


def test_tokens_and_vectors_are_the_same_with_other_models_steps_between(options: EngineOptions) -> None:
    """One model ends while the others compute."""
    folder = zoo.native_folder("bert")
    texts = [EncoderInput([5 + (7 * i + j) % 60 for j in range(30)]) for i in range(40)]
    wanted = load_encoders([str(folder)], ["0"]).encoders["0"].run("embed", texts)
    models = [options, replace(options, seed=1), replace(options, quantization="int8")]

    async def main() -> None:
        alone = []
        for model in models:
            engine = load_engine(model)
            engine.start()
            alone.append(await answers(engine))
            await engine.stop()
        cores = SharedCores()
        engines = [loaded(model, cores) for model in models]
        encoders = load_model_alone(EngineOptions(str(folder)), EncoderOptions(), ["it"], cores=cores)
        (encoder,) = encoders.encoders.values()
        for started in (*engines, encoders):
            started.start()
        passing = loaded(replace(options, seed=2), cores)
        passing.start()
        cut = asyncio.create_task(answers(passing))
        try:
            together = asyncio.gather(*map(answers, engines))
            for _ in range(3):
                np.testing.assert_array_equal(await encoders.submit(encoder, "embed", texts), wanted)
            await passing.stop()
            assert list(await together) == alone
        finally:
            await encoders.stop()
            for engine in engines:
                await engine.stop()
            await cut

    asyncio.run(asyncio.wait_for(main(), 60))


def threads() -> tuple[int, set[int]]:
    """How many this process has, and their priorities."""
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return len(tasks), {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the threads")
def test_a_model_loads_in_the_background_and_then_has_no_threads_of_its_own(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores, lowest = SharedCores(), []
    folder = str(zoo.native_folder("bert"))  # what makes it has threads of its own
    config = {"method": "draft_model", "model": options.model, "num_speculative_tokens": 2}
    drafted = replace(options, speculative=SpeculativeOptions(speculative_config=config))
    engines = [loaded(options, cores)]
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    wait_until(lambda: threads()[1] == {normal})
    num_threads, _ = threads()

    def warm_up(self: CpuExecutor, progress: Callable[[int, int], None]) -> None:
        lowest.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(CpuExecutor, "warm_up", warm_up)
    try:
        engines += [loaded(replace(options, seed=1), cores), loaded(drafted, cores)]
        encoders = load_model_alone(EngineOptions(folder), EncoderOptions(), ["it"], cores=cores)
        encoders.close()
        assert min(lowest) == min(normal + 10, 19)
        wait_until(lambda: threads() == (num_threads, {normal}))
    finally:
        for engine in engines:
            engine.close()


def test_a_core_that_was_lent_comes_back_when_its_model_is_unloaded(options: EngineOptions) -> None:
    cores = SharedCores()
    engines = [loaded(replace(options, seed=seed), cores) for seed in range(2)]
    lent = []

    async def main() -> None:
        for engine in engines:
            engine.start()
        engines[0].lend_threads(lambda executor: bool(lent.append(executor.yield_core(100))))
        await engines[0].stop()
        for passed_on in lent:
            if passed_on is not None:
                passed_on()
        assert len(await answer(engines[1], 100, 20)) == 20
        await engines[1].stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_memory_and_the_progress_of_a_load_are_told(options: EngineOptions) -> None:
    """What is planned in the memory of all does not depend on what is available now."""
    told: list[Progress] = []
    roomy, tight = (EngineLoad(replace(options, kv_cache_space=None), memory_bytes=2**size) for size in (30, 24))
    assert roomy.needs.weight_bytes == tight.needs.weight_bytes > 64 * (320 + 2 * 64 * 4)
    assert tight.needs.cache_bytes < 2**22
    with pytest.raises(ModelError, match=r"all models may take \(--memory\)"):
        EngineLoad(options, memory_bytes=2**20)
    with EngineLoad(options, memory_bytes=2**30, report=told.append) as load:
        engine = load.engine()
    engine.close()
    assert 0 <= load.needs.cache_bytes - int(engine.info["kv_cache_bytes"]) < 2**14
    assert sorted(told, key=lambda progress: (STAGES.index(progress.stage), progress.fraction)) == told
    assert {progress.stage for progress in told} >= {"reading"}
    folder = str(zoo.native_folder("bert"))
    assert needs_of_model(EngineOptions(folder), EncoderOptions()).total_bytes > 2**16
