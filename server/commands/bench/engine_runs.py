"""The same decoding through the engine: what scheduling, detokenizing and two threads add to the device's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.sampling_params import SamplingParams

from .workload import Decode, Workload

Arrivals = list[tuple[float, int]]  # when, in seconds, and how many tokens


async def decode_rates(
    engine: Engine, workload: Workload, vocab_size: int, seed: int
) -> dict[Decode, list[float] | None]:
    """Tokens a second of the workload's `decodes`, one for each repeat. The engine is started, and stopped in the end.

    Only the time when all sequences decode counts: from the last one's first token to the first one's last. None
    where there was no such time.
    """
    contexts = sorted({decode.context for decode in workload.decodes})
    batch_sizes = sorted({decode.batch_size for decode in workload.decodes})
    shape = (batch_sizes[-1], contexts[-1])
    prompts = np.random.default_rng(seed).integers(vocab_size, size=shape, dtype=np.int32)
    rates: dict[Decode, list[float] | None] = {}
    engine.start()
    try:
        for context in contexts:
            # From here on the prefix cache has the prompts, if there is one: the repeats take much less time.
            await generate(engine, prompts[:, :context].tolist(), 1)
            for batch_size in batch_sizes:
                measured = []
                for _ in range(workload.repeats):
                    arrivals = await generate(engine, prompts[:batch_size, :context].tolist(), workload.decode_tokens)
                    measured.append(common_rate(arrivals))
                found = [rate for rate in measured if rate is not None]
                rates[Decode(batch_size, context)] = found or None
    finally:
        await engine.stop()
    return rates


async def generate(
    engine: Engine, prompts: list[list[int]], num_tokens: int, loras: Sequence[Lora] | None = None
) -> list[Arrivals]:
    """Decode exactly `num_tokens` after each of the prompts (token ids), all together: when tokens arrived.

    `loras` are the prompts' adapters.
    """
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    readers = [
        _Reader(engine.submit(Request(f"bench-{i}", prompt, sampling, lora=None if loras is None else loras[i])))
        for i, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*(reader.all_arrivals for reader in readers)))


class _Reader:
    """Takes a stream's outputs as they are pushed, as a server does: a task that is woken for each takes longer."""

    def __init__(self, stream: RequestStream) -> None:
        self.all_arrivals: asyncio.Future[Arrivals] = asyncio.get_running_loop().create_future()
        self._arrivals: Arrivals = []
        stream.read(self)
        stream.resume()

    def push(self, output: RequestOutput) -> None:
        """See Sink."""
        if output.token_ids:
            self._arrivals.append((time.perf_counter(), len(output.token_ids)))
        if output.finish_reason is not None and output.finish_reason is not FinishReason.LENGTH:
            raise TidewheelError(output.error or f"a request ended with {output.finish_reason.value}")

    def end(self, failure: Exception | None) -> None:
        """See Sink."""
        if self.all_arrivals.done():  # it was cancelled
            return
        if failure is None:
            self.all_arrivals.set_result(self._arrivals)
        else:
            self.all_arrivals.set_exception(failure)


def common_rate(sequences: list[Arrivals]) -> float | None:
    """Tokens a second while all sequences were decoding; None if there was no such time."""
    start = max(arrivals[0][0] for arrivals in sequences)
    end = min(arrivals[-1][0] for arrivals in sequences)
    if end <= start:
        return None
    return sum(count for arrivals in sequences for at, count in arrivals if start < at <= end) / (end - start)
