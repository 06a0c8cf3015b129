"""Tidewheel's runner: its engine, without the server around it."""

from __future__ import annotations

import asyncio
from typing import Any

import job

_NO_STEP_LIMIT_MS = 1e9  # no peer bounds a step's time either


class Tidewheel:
    """An engine that runs on an event loop of its own."""

    def __init__(self, given: job.Job) -> None:
        from tidewheel import __version__
        from tidewheel.engine.devices.cpu.options import CpuOptions
        from tidewheel.engine.load import load_engine
        from tidewheel.engine.options import EngineOptions

        is_dtype = given.weights in ("float32", "bfloat16", "float16")
        weights: dict[str, Any] = {"dtype" if is_dtype else "quantization": given.weights}
        self.version = __version__
        on_cores = CpuOptions(threads_bind=",".join(map(str, given.cpus)))
        self._loop = asyncio.new_event_loop()
        self._engine = load_engine(
            EngineOptions(
                model=given.model,
                max_model_len=given.longest + 1,  # the engine wants room for a token after the last
                max_num_seqs=given.most_sequences,
                max_step_ms=_NO_STEP_LIMIT_MS,
                enable_prefix_caching=False,
                device=given.device,
                device_options=(on_cores,) if given.device in ("auto", "cpu") else (),
                **weights,
            )
        )
        self._engine.start(self._loop)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        from tidewheel.server.commands.bench.engine_runs import generate

        return self._loop.run_until_complete(generate(self._engine, prompts, new_tokens))


if __name__ == "__main__":
    job.run(Tidewheel)
