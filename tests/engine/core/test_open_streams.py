"""What a step of many sequences means for their streams is passed on while others have their turn."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from engine.core.test_stream import IDS, TOKENIZER, Taker

from tidewheel.engine.core.engine_core_outputs import EngineCoreOutputs
from tidewheel.engine.core.open_streams import OpenStreams
from tidewheel.engine.core.output_processor import OutputProcessor
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.step import Finished

WORK_S = 0.001  # at least, for each output
COUNT = 40


@pytest.mark.parametrize("aborts", [False, True])
def test_few_outputs_between_two_moments_of_others(aborts: bool) -> None:
    counts, aborted, passed_on = [0], list[int](), list[int]()

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            counts.append(0)

    def take() -> None:
        time.sleep(WORK_S)  # which holds up the event loop
        counts[-1] += 1

    async def run() -> None:
        streams = OpenStreams(aborted.extend, _raised)
        streams.start(asyncio.get_running_loop())
        choices = [OutputProcessor(key, 0, SamplingParams(), TOKENIZER.detokenizer()) for key in range(COUNT)]
        takers = [Taker(lambda output: take()) for _ in choices]
        opened = [streams.open([choice]) for choice in choices]
        for stream, taker in zip(opened, takers, strict=True):
            stream.read(taker)
            stream.resume()
        other = asyncio.create_task(others())
        for step, token in enumerate(IDS[:3]):
            outputs = EngineCoreOutputs([*range(COUNT)], [token] * COUNT, passed_on=partial(passed_on.append, step))
            if step == 2:
                outputs.finished = [Finished(key, FinishReason.LENGTH) for key in range(COUNT)]
            streams.deliver(outputs)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if aborts:
            opened[-1].abort()
        await streams.ended()
        await asyncio.sleep(0)
        other.cancel()
        for taker in takers[:-1]:
            assert (taker.ids(), taker.ends) == (IDS[:3], [None])
        last = takers[-1]
        assert last.outputs[-1].finish_reason is (FinishReason.ABORT if aborts else FinishReason.LENGTH)
        assert last.ends == [None]
        assert last.ids() == IDS[: len(last.ids())]

    asyncio.run(run())
    assert max(counts) <= 6
    assert passed_on == [0, 1, 2]
    assert aborted == ([COUNT - 1] if aborts else [])


def _raised(failure: BaseException) -> None:
    raise failure
