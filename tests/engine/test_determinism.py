"""A request's tokens and log-probabilities depend on the request alone: on real devices, to the bit.

Requests arrive at random, share prefixes, are chunked by random budgets, preempted in tiny pools and aborted; each
must sample what it samples alone, on one thread, in a roomy pool, with its prompt computed at once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import models_zoo
import pytest
from engine.driving import Driver, Job, alone, random_clock
from harness import device_ids, make_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.base import DType, Executor, ExecutorOptions, KvCacheDType
from tidewheel.engine.models import describe
from tidewheel.engine.request import FinishReason, SamplingParams
from tidewheel.engine.weights import open_weights, read_config

pytest.importorskip("transformers")

MAX_LENGTH = 64  # tokens, prompt and output together
EOS = frozenset({0, 1, 2, 3})

_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
_IDS = device_ids()
_BEST = _IDS[1] if len(_IDS) > 1 else None
_EIGHT_BITS: tuple[KvCacheDType, ...] = ("fp8_e5m2", "int8")
# Every level with the dtype that most models come in, the best one with both, on one thread and on two; and every
# other type of cache on two.
SUBJECTS: list[tuple[str, DType, KvCacheDType, int]] = [("torch", "float32", "float32", 1)]
SUBJECTS += [
    (device, dtype, dtype, threads)
    for device in _IDS
    if device != "torch"
    for dtype in (_DTYPES if device == _BEST else _DTYPES[1:])
    for threads in (1, 2)
]
SUBJECTS += [
    (device, "bfloat16", cached, 2)
    for device in _IDS
    if device != "torch"
    for cached in (("float16", *_EIGHT_BITS) if device == _BEST else _EIGHT_BITS)
]


@functools.cache
def executor(device_id: str, dtype: DType, kv_cache_dtype: KvCacheDType, threads: int) -> Executor:
    folder = models_zoo.folder("llama")
    description = describe(read_config(folder), None)
    device = make_device(device_id)
    options = ExecutorOptions(
        dtype=dtype,
        kv_cache_bytes=64 * 16 * device.kv_bytes_per_token(description.spec, kv_cache_dtype),
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        threads_bind="auto" if device_id == "torch" else bind(threads),
        kv_cache_dtype=kv_cache_dtype,
    )
    return device.load(description.spec, open_weights(folder, description), options)


def bind(threads: int) -> str:
    native: Any = importlib.import_module("tidewheel._native")
    cpus = [processor["cpu"] for processor in native.topology()["processors"]]
    if len(cpus) < threads:
        pytest.skip(f"this machine has no {threads} processors")
    return ",".join(map(str, cpus[:threads]))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stem = draw(st.integers(0, 40))  # shared by all that draw as much: one prefix is within the other
    tail = draw(st.lists(st.integers(4, 300), min_size=0 if stem else 1, max_size=6))
    penalized = draw(st.booleans())
    sampling = SamplingParams(
        max_tokens=draw(st.sampled_from([1, 4, 20, 40])),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        top_k=draw(st.sampled_from([0, 20])),
        repetition_penalty=1.2 if penalized else 1.0,
        presence_penalty=0.5 if penalized else 0.0,
        min_tokens=draw(st.sampled_from([0, 1])),
        n=draw(st.sampled_from([1, 1, 2])),
        logprobs=draw(st.sampled_from([None, 0, 5])),
    )
    prompt = (*((7 * i) % 300 + 4 for i in range(stem)), *tail)
    return Job(prompt, sampling, draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from([0, 0, 1])))


moments = st.lists(
    st.tuples(st.lists(jobs(), max_size=2), st.lists(st.integers(0, 20), max_size=1)), min_size=1, max_size=5
)


@pytest.mark.parametrize(("device_id", "dtype", "kv_cache_dtype", "threads"), SUBJECTS)
def test_any_company_gives_the_same_bits(
    device_id: str, dtype: DType, kv_cache_dtype: KvCacheDType, threads: int
) -> None:
    subject = executor(device_id, dtype, kv_cache_dtype, threads)

    @settings(
        max_examples=4 if device_id == "torch" else 30,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(moments, st.integers(4, 12), st.integers(1, 8), st.sampled_from([8, 13, 50, 128]), st.integers(0, 99))
    def property_holds(
        arrivals: list[tuple[list[Job], list[int]]], num_blocks: int, num_seqs: int, num_tokens: int, seed: int
    ) -> None:
        limits = dataclasses.replace(
            subject.limits, num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens
        )
        driver = Driver(subject, MAX_LENGTH, EOS, clock=random_clock(seed), limits=limits)
        owners: dict[int, tuple[Job, int]] = {}
        for arriving, aborted in arrivals:
            for job in arriving:
                owners |= {key: (job, index) for index, key in enumerate(driver.add(job))}
            for number in aborted:
                driver.abort(number)
            driver.step()
        driver.run()
        for key, (job, index) in owners.items():
            expected = alone(executor(device_id, dtype, kv_cache_dtype, 1), MAX_LENGTH, job, index, EOS)
            if driver.finished[key].reason is FinishReason.ABORT:
                expected = expected[: len(driver.sampled[key])]
            assert driver.sampled[key] == expected

    property_holds()
