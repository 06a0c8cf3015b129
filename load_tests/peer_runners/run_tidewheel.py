"""Tidewheel's runner: its engine, without the server around it."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

import job

_NO_STEP_LIMIT_MS = 1e9  # no other peer bounds a step's time


class Tidewheel:
    """An engine that runs on its own event loop."""

    def __init__(self, given: job.Job) -> None:
        from tidewheel import __version__
        from tidewheel.engine.adapters.options import LoraModule
        from tidewheel.engine.declaring.mistakes import Mistakes
        from tidewheel.engine.loading.load import load_engine
        from tidewheel.server.options.model import engine_options, model_parser, read_model_options

        wanted: dict[str, Any] = {
            "model": given.file or given.model,
            "max_model_len": given.longest + 1,  # the engine wants room for a token after the last
            "max_num_seqs": given.max_sequences,
            "max_step_ms": _NO_STEP_LIMIT_MS,
            "enable_prefix_caching": False,
        }
        if given.adapters:
            modules = [LoraModule(_name(i), path) for i, path in enumerate(given.adapters)]
            wanted |= {"enable_lora": True, "lora_modules": modules}
            wanted |= {"max_loras": len(modules), "max_lora_rank": given.rank}
        if given.file is None:
            wanted["dtype" if given.weights in job.DTYPES else "quantization"] = given.weights
        parser = model_parser("--options", "Tidewheel's options")
        mistakes = Mistakes()
        asked = read_model_options(parser.read(shlex.split(given.options), mistakes), mistakes)
        parser.refuse(mistakes)
        if asked.get("device", "cpu") == "cpu":
            wanted["threads_bind"] = ",".join(map(str, given.cpus))
        self.version = __version__
        self._loop = asyncio.new_event_loop()
        self._engine = load_engine(engine_options(wanted | asked))
        self._engine.start(self._loop)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        from tidewheel.server.commands.bench.engine_runs import generate

        return self._loop.run_until_complete(generate(self._engine, prompts, new_tokens))

    def generate_adapted(self, prompts: list[list[int]], new_tokens: int, adapters: list[int]) -> list[job.Arrivals]:
        """The same, each prompt with one of the job's adapters."""
        return self._loop.run_until_complete(self._adapted(prompts, new_tokens, adapters))

    async def _adapted(self, prompts: list[list[int]], new_tokens: int, adapters: list[int]) -> list[job.Arrivals]:
        from tidewheel.server.commands.bench.engine_runs import generate

        registry = self._engine.loras
        assert registry is not None
        leases = [await registry.lease(_name(i)) for i in adapters]
        try:
            return await generate(self._engine, prompts, new_tokens, [lease.lora for lease in leases])
        finally:
            for lease in leases:
                lease.release()


def _name(adapter: int) -> str:
    return f"adapter-{adapter}"


if __name__ == "__main__":
    job.run(Tidewheel)
