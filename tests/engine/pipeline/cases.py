"""Models in stages, requests of all kinds, and what a model answers to them, to the bit."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import models_zoo
from cores import one_core

from tidewheel import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,  # less than the longest prompts
    "num_gpu_blocks_override": 20,  # less than all sequences need
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of the zoo, in how many stages, and what it is loaded with."""

    model: str
    stages: int = 2
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        return "-".join([self.model, str(self.stages), *(str(value) for _, value in self.options)])


CASES = [
    Case("gemma3n", 2),  # several streams, and per-layer embeddings
    Case("deepseek-v3", 2, (("kv_cache_dtype", "int8"),)),
]
IN_GROUPS = [Case("granitemoehybrid", 3, (("quantization", "int8"),))]
"""The cases whose stages have groups of cores in the tests."""
SWEPT_IN_GROUPS = [Case("llama-tied"), Case("gemma3n"), Case("deepseek-v3", 2, (("kv_cache_dtype", "int8"),))]
"""More of them, which `make test` leaves out."""
SWEPT = [
    Case("llama-tied"),
    Case("granitemoehybrid", 3, (("quantization", "int8"),)),
    Case("opt-350m"),  # projections around the layers
    Case("qwen3", 2, (("dtype", "bfloat16"),)),
    Case("mistral-window", 2, (("quantization", "int4"),)),
    Case("qwen3_5"),
    Case("qwen3-moe", 2, (("kv_cache_dtype", "int8"),)),
    Case("deepseek-v3"),
]
"""Models that `make test` leaves out."""


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which begin alike, and parameters of all kinds."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 90) for _ in range(48)]
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (1, 7, 16, 33, 70)]
    prompts += [[*shared, *prompts[1]], [*shared, *prompts[2]], shared]
    params = [
        SamplingParams(max_tokens=14, temperature=0.0, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, n=3),
        SamplingParams(max_tokens=9, temperature=0.7, seed=2, repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingParams(max_tokens=10, temperature=0.0, prompt_logprobs=1, logprobs=1),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=12, temperature=0.9, seed=3, top_k=5, min_tokens=4, logprobs=0),
        SamplingParams(max_tokens=40, temperature=0.8, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=11, temperature=0.0, logit_bias={5: 2.0}),
    ]
    return prompts, params


def answers(folder: Path, **options: Any) -> list[Any]:
    prompts, params = requests()
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts[3:6], params[3:6], use_tqdm=False)  # with what is in the cache
    return [
        (output.prompt_logprobs, [(choice.token_ids, choice.logprobs) for choice in output.outputs])
        for output in (*first, *again)
    ]


@functools.cache
def expected(model: str, options: tuple[tuple[str, Any], ...] = ()) -> list[Any]:
    """The answers of a model of the zoo in one process, on one thread."""
    return answers(models_zoo.folder(model, tokenizer=True), threads_bind=one_core(), **dict(options))
