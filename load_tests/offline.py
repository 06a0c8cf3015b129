"""Compares LLM.generate with `tidewheel bench`: many short prompts, and the speed of the same batch in the benchmark.

python load_tests/offline.py ./my-model --prompts 10000 --batch-size 32
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import tidewheel
from tidewheel import LLM, SamplingParams

# The file and not `-m tidewheel`, which would look for the package in the current folder first.
_PROGRAM = str(Path(tidewheel.__file__).with_name("__main__.py"))
_FIRST_TOKEN_ID = 256  # of the prompts: above the special tokens that most vocabularies begin with
_LAST_TOKEN_ID = 1999


class Rates(NamedTuple):
    """Tokens a second: the device's for prompts, the engine's while a whole batch decodes."""

    prefill: float
    decode: float


def bench(args: argparse.Namespace) -> Rates:
    """The rates of `tidewheel bench`."""
    length = args.prompt_tokens
    command = [
        *(sys.executable, _PROGRAM, "bench", *args.model, "--json", "-", "--skip", "startup"),
        *("--prefill", f"{args.batch_size}x{length}", "--batch-sizes", str(args.batch_size)),
        *("--contexts", str(length), "--decode-tokens", str(args.max_tokens), "--repeats", str(args.repeats)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    [prefill], [decode] = report["prefill"], report["decode"]
    return Rates(prefill["tokens_per_second"]["median"], decode["engine_tokens_per_second"]["median"])


def generate(args: argparse.Namespace) -> float:
    """Seconds that LLM.generate takes."""
    random = Random(0)
    prompts = [
        [random.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(args.prompt_tokens)]
        for _ in range(args.prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    with LLM(*args.model, max_num_seqs=args.batch_size) as llm:
        llm.generate(prompts[: args.batch_size], params, use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
    if any(len(output.outputs[0].token_ids) != args.max_tokens for output in outputs):
        sys.exit("some answers are too short: the figures mean nothing")
    return seconds


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="a folder, file or hub id [the built-in model]")
    parser.add_argument("--prompts", type=int, default=10_000, help="how many [10000]")
    parser.add_argument("--prompt-tokens", type=int, default=8, help="tokens of each [8]")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each answer [32]")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences in a step [32]")
    parser.add_argument("--repeats", type=int, default=3, help="of the benchmark [3]")
    args = parser.parse_args()
    seconds, rates = generate(args), bench(args)
    answered = args.prompts * args.max_tokens
    expected = args.prompts * args.prompt_tokens / rates.prefill + answered / rates.decode
    print(f"LLM.generate     {answered / seconds:10.0f} tokens/s of answers, {seconds:.1f} s")
    print(f"tidewheel bench  {rates.decode:10.0f} tokens/s of answers, {rates.prefill:.0f} tokens/s of prompts")
    print(f"both parts as in tidewheel bench take {expected:.1f} s: LLM.generate reaches {expected / seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
