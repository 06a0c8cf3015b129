"""Measures what LoRA adapters cost: the same streams without an adapter, all with one, and spread over several.

The adapters are random ones of all linear layers that can have one. What follows `--` are options of the engine.

    python load_tests/lora.py ./my-model --adapters 8 --rank 16 --streams 32 -- --quantization int8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from tidewheel.engine.adapters.modules import adaptable_modules
from tidewheel.engine.adapters.options import LoraModule, LoraOptions
from tidewheel.engine.engine import Engine
from tidewheel.engine.load import load_engine
from tidewheel.engine.models import ModelDescription, describe
from tidewheel.engine.request import Request
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.lora import EMBED, HEAD
from tidewheel.server.commands.bench.engine_runs import Arrivals, common_rate
from tidewheel.server.options.serve import parse_options

_CONFIG = {"peft_type": "LORA", "lora_alpha": 1.0, "bias": "none"}
_PROMPT_TOKENS = 32


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments[:split])
    options = parse_options([given.model, *arguments[split + 1 :]]).engine
    source = open_source(options.model, options.revision, options.download_dir, options.load_format, options.seed)
    description = describe(source.config, options.max_model_len)
    with TemporaryDirectory() as folder:
        modules = tuple(
            LoraModule(f"adapter-{i}", str(_make(Path(folder) / str(i), description, given.rank, i)))
            for i in range(given.adapters)
        )
        lora = LoraOptions(enable_lora=True, lora_modules=modules, max_loras=given.adapters, max_lora_rank=given.rank)
        engine = load_engine(replace(options, lora=lora))
        rates = asyncio.run(_measure(engine, given.adapters, given.streams, given.tokens, given.rounds))
    base = rates[0]
    for count, rate in rates.items():
        print(f"{count:3} adapters of rank {given.rank}: {rate:8.1f} tokens/s, {rate / base:.3f} of the model's")
    return 0


def _make(folder: Path, description: ModelDescription, rank: int, seed: int) -> Path:
    """An adapter of all linear layers that can have one, small enough to change little."""
    random = np.random.default_rng(seed)
    tensors = {}
    for module, targets in adaptable_modules(description.spec, description.tensors).items():
        if targets[0].name in (EMBED, HEAD):
            continue
        outputs = sum(target.outputs for target in targets)
        for name, shape in (("A", (rank, targets[0].inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = 0.01 * random.standard_normal(shape, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG))
    return folder


async def _measure(engine: Engine, adapters: int, streams: int, tokens: int, rounds: int) -> dict[int, float]:
    """Tokens a second by the number of adapters: the median of rounds in which all take turns."""
    found: dict[int, list[float]] = {count: [] for count in (0, 1, adapters)}
    engine.start()
    try:
        for _ in range(rounds):
            for count, rates in found.items():
                rate = common_rate(await _generate(engine, count, streams, tokens))
                if rate is not None:
                    rates.append(rate)
    finally:
        await engine.stop()
    return {count: median(rates) for count, rates in found.items()}


async def _generate(engine: Engine, adapters: int, streams: int, tokens: int) -> list[Arrivals]:
    assert engine.loras is not None
    names = [f"adapter-{i % adapters}" if adapters else None for i in range(streams)]
    leases = [None if name is None else await engine.loras.lease(name) for name in names]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    try:
        requests = [
            Request(f"{i}", [i % 100 + 3] * _PROMPT_TOKENS, sampling, lora=None if lease is None else lease.lora)
            for i, lease in enumerate(leases)
        ]
        return list(await asyncio.gather(*(_read(engine, request) for request in requests)))
    finally:
        for lease in leases:
            if lease is not None:
                lease.release()


async def _read(engine: Engine, request: Request) -> Arrivals:
    return [(asyncio.get_running_loop().time(), len(output.token_ids)) async for output in engine.submit(request)]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
