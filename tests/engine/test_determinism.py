"""A request's tokens and log-probabilities depend on the request alone: on real devices, to the bit.

Requests arrive at random, share prefixes, are chunked by random budgets, preempted in tiny pools and aborted; each
must sample what it samples alone, on one thread, in a roomy pool, with its prompt computed at once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import beside_zoo
import models_zoo
import pytest
import stored_zoo
from engine.driving import Driver, Job, alone, check_any_company
from engine.weights.stored_tensors import KINDS, StoredWeights, decoder
from harness import device_ids, make_device
from hypothesis import strategies as st
from optional_packages import require_packages

from tidewheel.engine.devices.cache_split import max_states
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights import open_weights, read_config
from tidewheel.engine.weights.dtypes import DType, KvCacheDType
from tidewheel.engine.weights.quantization import Quantization
from tidewheel.engine.weights.tensor import WeightSource

require_packages("transformers")

MAX_LENGTH = 64  # tokens, prompt and output together
EOS = frozenset({0, 1, 2, 3})
STORED = "all formats of quantized files"
# Experts, and what is around them.
STORED_SAMPLE = ("qwen3_next-experts", "gpt-oss", "deepseek-v3", "falcon-h1")


class Subject(NamedTuple):
    """What is asked. With a `first_kind` the weights are in formats of quantized files: see StoredFamily."""

    device: str
    dtype: DType
    kv_cache_dtype: KvCacheDType
    threads: int
    quantization: Quantization | None = None
    groups: int = 1
    model: str = "llama"
    first_kind: str | None = None

    def __str__(self) -> str:
        threads = f"{self.threads}" if self.groups == 1 else f"{self.threads} in {self.groups} groups"
        model = "" if self.model == "llama" else f"{self.model}-"
        model += f"from-{self.first_kind}-on-" if self.first_kind else ""
        return f"{model}{self.device}-{self.quantization or self.dtype}-{self.kv_cache_dtype}-{threads}"


_LEVELS = [device for device in device_ids() if device != "torch"]
_QUANTIZATIONS = [
    Quantization("int8"),
    Quantization("int8-channel"),
    Quantization("int4-fast"),
    Quantization("int4-fast", 128, zero_points=True),
]


def subjects() -> Iterator[Subject]:
    """The best level with every type of weight and of cache, with windows, and with each kind of layer; the others
    with a type of weight for each kernel.

    Two threads, or two groups, share each kind of layer and each type of float. They take long where others compute on
    the same cores, so what differs in the type of weights or caches alone has one.
    """
    best, *others = _LEVELS
    # Whose windows free and reuse blocks.
    yield Subject("torch", "float32", "float32", 1, model="mistral-window")
    yield Subject(best, "bfloat16", "int8", 1, model="mistral-window")
    yield Subject(best, "bfloat16", "bfloat16", 2, groups=2, model="gemma2")
    # Whose states are restored from snapshots, and go back behind rejected draft tokens.
    for model in ("qwen3_5", "lfm2"):
        yield Subject(best, "bfloat16", "bfloat16", 2, groups=2, model=model)
    yield Subject(best, "bfloat16", "bfloat16", 2, groups=2, model="minicpm3")  # a latent for all heads
    yield Subject(best, "bfloat16", "bfloat16", 2, groups=2, model="gemma3n")  # several streams, shared K and V
    yield Subject(best, "bfloat16", "fp8_e5m2", 1, _QUANTIZATIONS[2], model="olmoe")
    yield Subject(best, "bfloat16", "bfloat16", 2, model=STORED)
    yield from _spread(STORED_SAMPLE)
    yield Subject(best, "bfloat16", "bfloat16", 2)
    yield Subject(best, "float32", "float32", 2)
    yield Subject(best, "float16", "float16", 1)
    yield Subject(best, "bfloat16", "fp8_e5m2", 1)
    yield Subject(best, "bfloat16", "fp8_e4m3", 1)
    yield Subject(best, "bfloat16", "int4", 2, groups=2)
    for quantization in _QUANTIZATIONS:
        yield Subject(best, "bfloat16", "int8", 1, quantization)
    for level in others:
        yield Subject(level, "bfloat16", "bfloat16", 1)
        yield Subject(level, "bfloat16", "int8", 1, _QUANTIZATIONS[2])


def _spread(models: Iterable[str]) -> Iterator[Subject]:
    """These models at one level after the other, and in one format after the other."""
    for i, model in enumerate(models):
        level, first_kind = _LEVELS[i % len(_LEVELS)], KINDS[11 * i % len(KINDS)]
        yield Subject(level, "bfloat16", "bfloat16", 2, groups=2, model=model, first_kind=first_kind)


def swept_subjects() -> Iterator[Subject]:
    """Subjects that are much like others, or take minutes, including the whole zoo.

    Each level has each family in floats and in some formats of quantized files, and each kind of layer in all formats.
    """
    best, *others = _LEVELS
    seen = set(subjects())
    for level in _LEVELS:
        for i, model in enumerate(models_zoo.CASES):
            formats = stored_zoo.FIRST_KINDS if model in stored_zoo.MIXERS else (KINDS[i % len(KINDS)],)
            for first_kind in (None, *formats):
                subject = Subject(level, "bfloat16", "bfloat16", 2, groups=2, model=model, first_kind=first_kind)
                if subject not in seen:
                    yield subject
        for model in beside_zoo.NAMES:
            yield Subject(level, "bfloat16", "bfloat16", 2, groups=2, model=model)
    for model in ("llama", "gemma2", "qwen2-window", "gemma3", "qwen3_5", "deepseek-v3", "qwen3_next-experts"):
        yield Subject("torch", "float32", "float32", 1, model=model)
    for model in ("mistral-window", "gemma2", "gemma4", "qwen2-window", "gemma3", "minicpm3"):
        yield Subject(best, "bfloat16", "int8", 2, model=model)
    yield Subject(best, "bfloat16", "int8", 2, _QUANTIZATIONS[0], model="deepseek-v3")
    yield Subject(best, "bfloat16", "fp8_e5m2", 2, _QUANTIZATIONS[2], model="olmoe")
    yield Subject(best, "bfloat16", "bfloat16", 1)
    yield Subject(best, "float32", "float32", 1)
    yield Subject(best, "float16", "float16", 2)
    yield Subject(best, "bfloat16", "fp8_e5m2", 2)
    yield Subject(best, "bfloat16", "fp8_e4m3", 2, groups=2)
    for quantization in _QUANTIZATIONS:
        yield Subject(best, "bfloat16", "int8", 2, quantization)
    for level in others:
        yield Subject(level, "bfloat16", "bfloat16", 2, model=STORED)
        yield Subject(level, "bfloat16", "bfloat16", 2)
        for kv_cache_dtype in ("fp8_e5m2", "fp8_e4m3", "int4"):
            yield Subject(level, "bfloat16", kv_cache_dtype, 2)
        for quantization in _QUANTIZATIONS:
            yield Subject(level, "bfloat16", "int8", 2, quantization)


@functools.lru_cache(maxsize=8)
def executor(subject: Subject) -> Executor:
    spec, weights = opened(subject)
    threads_bind = None if subject.device == "torch" else bind(subject.threads, subject.groups)
    device = make_device(subject.device, threads_bind)
    # Twice the states, because they get at most half of the cache.
    slot_bytes = device.slot_bytes(spec)
    states = 2 * slot_bytes * max_states(8)
    options = ExecutorOptions(
        dtype=subject.dtype,
        kv_cache_bytes=64 * 16 * device.kv_bytes_per_token(spec, subject.kv_cache_dtype) + states,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_dtype=subject.kv_cache_dtype,
        quantization=subject.quantization,
    )
    return device.load(spec, weights, options)


def opened(subject: Subject) -> tuple[DecoderSpec, WeightSource]:
    if subject.model == STORED:
        spec = decoder(tied=False, num_layers=4)
        return spec, StoredWeights(spec, *KINDS)
    if subject.first_kind is not None:
        return stored_zoo.spec(subject.model), stored_zoo.StoredFamily(subject.model, subject.first_kind)
    zoo = beside_zoo if subject.model in beside_zoo.NAMES else models_zoo
    folder = zoo.folder(subject.model)
    description = describe(read_config(folder), None)
    return description.spec, open_weights(folder, description)


def bind(threads: int, groups: int) -> str:
    native: Any = importlib.import_module("tidewheel._native")
    cpus = [processor["cpu"] for processor in native.topology()["processors"]]
    if len(cpus) < threads:
        pytest.skip(f"this machine has no {threads} processors")
    return "|".join(",".join(map(str, cpus[group:threads:groups])) for group in range(groups))


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
        n=draw(st.sampled_from([1, 1, 1, 3])),
        logprobs=draw(st.sampled_from([None, 0, 5])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 5])),
    )
    prompt = (*((7 * i) % 300 + 4 for i in range(stem)), *tail)
    return Job(prompt, sampling, draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from([0, 0, 1])))


# Each example computes its sequences together, and each one alone.
@pytest.mark.parametrize(
    "subject", [*subjects(), *(pytest.param(one, marks=pytest.mark.sweep) for one in swept_subjects())], ids=str
)
def test_any_company_gives_the_same_bits(subject: Subject, request: pytest.FixtureRequest) -> None:
    is_wide = subject.model == STORED or subject.first_kind is not None  # as blocks want it
    if request.node.get_closest_marker("sweep"):
        max_examples = 5 if is_wide else 20
    else:
        max_examples = 3 if is_wide or subject.threads > 1 else 4
    if subject.device == "torch":
        max_examples = 2  # each token is computed alone
    check_any_company(
        executor(subject),
        executor(subject._replace(threads=1, groups=1)),
        jobs(),
        max_length=MAX_LENGTH,
        eos_ids=EOS,
        num_blocks=st.integers(4, 12),
        num_batched_tokens=st.sampled_from([8, 13, 50, 128]),
        max_examples=max_examples,
    )


@pytest.mark.parametrize(
    "subject",
    [
        Subject(_LEVELS[0], "bfloat16", "bfloat16", 2),
        Subject(_LEVELS[0], "bfloat16", "int8", 2, groups=2, model="gemma2"),
        Subject(_LEVELS[0], "bfloat16", "float32", 2, model="minicpm3"),
    ],
    ids=str,
)
def test_a_common_prefix_gives_the_same_bits(subject: Subject) -> None:
    """Long enough for attention to take it for all sequences together, while others arrive and end."""
    most = 8
    stem = tuple((7 * i) % 300 + 4 for i in range(190))
    jobs = [
        Job(
            (*stem[: 190 - 9 * i], *(40 + 3 * i + j for j in range(1 + 5 * i))),
            SamplingParams(max_tokens=4 + i, temperature=0.7, logprobs=5),
            seed=i,
        )
        for i in range(most)
    ]
    reference = executor(subject._replace(threads=1, groups=1))
    expected = [alone(reference, 256, job, 0, EOS) for job in jobs]
    driver = Driver(executor(subject), 256, EOS)
    keys = driver.add(jobs[0])
    driver.step()
    for job in jobs[1:]:
        keys += driver.add(job)
        driver.step()
    driver.run()
    assert [(driver.sampled[key], driver.scored[key]) for key in keys] == expected
