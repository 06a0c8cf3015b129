"""A small model, served a storm of mixed requests through the scheduler."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import cache

from engine.devices.made_models import NORM, PLAIN, ROPE, RandomWeights, decoder, decoder_of
from engine.driving import Driver, Job

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.base import Device
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models.spec import (
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    ResidualBlockSpec,
    ShortConvSpec,
)
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights.dtypes import DType

MAX_LENGTH = 96
MEMORY = 64 << 20  # of a faked device
FEW_BUCKETS = GraphOptions(
    bucketing="exponential", prompt_bs_bucket_max=2, prompt_seq_bucket_min=32, decode_seq_bucket_min=MAX_LENGTH
)
SPEC = decoder(dataclasses.replace(PLAIN, rope=ROPE), dataclasses.replace(PLAIN, sliding_window=24))
# A mixer of each kind that is not in SPEC, two a layer.
MIXED = decoder_of(
    *(
        tuple(ResidualBlockSpec(mixer, NORM) for mixer in layer)
        for layer in (
            (LatentAttentionSpec(3, 24, 40, 20, 56, 0.125, ROPE, NORM), ExpertsSpec(5, 2, 40)),
            (DeltaNetSpec(2, 4, 24, 16, 4, NORM), ShortConvSpec(64, 3)),
            (Mamba2Spec(4, 24, 2, 20, 4, NORM), dataclasses.replace(PLAIN, rope=ROPE)),
        )
    )
)


def load(device: Device, dtype: DType = "float32", spec: DecoderSpec = SPEC, num_blocks: int | None = None) -> Executor:
    """The model of SPEC, or of another spec, warmed up."""
    options = ExecutorOptions(
        dtype=dtype,
        kv_cache_bytes=None if device.capabilities.own_memory else 4096 * device.kv_bytes_per_token(spec, dtype),
        max_model_len=MAX_LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=MAX_LENGTH,
        kv_cache_dtype=dtype,
        num_blocks=num_blocks,
    )
    executor = device.load(spec, RandomWeights(spec), options)
    executor.warm_up(lambda done, steps: None)
    return executor


def storm() -> list[Job]:
    """Requests of all lengths, greedy and seeded. Some begin alike, and some have penalties and logprobs."""
    rng = random.Random(1)
    common = [rng.randrange(96) for _ in range(40)]
    jobs = []
    for index in range(6):
        own = [rng.randrange(96) for _ in range(rng.randint(1, 50))]
        prompt = (common if index % 3 == 0 else []) + own
        sampling = SamplingParams(
            max_tokens=rng.randint(1, min(12, MAX_LENGTH - len(prompt))),
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, 2]),
        )
        jobs.append(Job(tuple(prompt), sampling, seed=index))
    return jobs


def serve(executor: Executor, jobs: Sequence[Job]) -> list[list[int]]:
    """The tokens of each job; they arrive in threes."""
    driver = Driver(executor, MAX_LENGTH, vocab_size=96)
    keys = []
    for start in range(0, len(jobs), 3):
        keys += [key for job in jobs[start : start + 3] for key in driver.add(job)]
        driver.step()
    driver.run()
    return [[token for token, *_ in driver.sampled[key]] for key in keys]


@cache
def reference(device: str, dtype: DType, spec: DecoderSpec = SPEC, num_jobs: int | None = None) -> list[list[int]]:
    """What a device without an accelerator answers to the storm, or to its first jobs."""
    options = [dataclasses.replace(FEW_BUCKETS, enforce_eager=True)] if device == "graph-cpu" else []
    return serve(load(get_device(device, options), dtype, spec), storm()[:num_jobs])
