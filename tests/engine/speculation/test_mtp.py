"""A checkpoint's own layer for drafts (MTP): it guesses what transformers' modules say, and changes no token."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import mtp_zoo
import numpy as np
import pytest
from engine.driving import Driver, Job, alone, check_any_company
from engine.speculation.layer_drafts import (
    EOS,
    GUESSES,
    MAX_LENGTH,
    OPTIONS,
    PROMPT,
    Recorder,
    constraints,
    drafting,
    job,
    jobs,
    right,
)
from harness import make_device
from hypothesis import strategies as st
from optional_packages import require_packages

from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.devices.base import Executor, LoraExecutor, LoraLimits
from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.models import describe
from tidewheel.engine.speculation.mtp import MtpDrafter
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate
from tidewheel.engine.weights.quantization import Quantization

require_packages("transformers")
pytest.importorskip("llguidance")  # not there on every machine
pytest.importorskip("tidewheel._native")


def load(folder: Path, threads_bind: str = "0,0", *, with_mtp: bool = True, **changed: Any) -> Executor:
    from tidewheel import _native

    source = open_source(str(folder))
    description = describe(source.config, None)
    description = description.with_mtp() if with_mtp else description
    device = make_device(f"cpu-{_native.chosen_isa_level('auto')}", threads_bind)
    weights = source.weights(description, source.config)
    return device.load(description.spec, weights, dataclasses.replace(OPTIONS, **changed))


@functools.cache
def loaded(name: str, *, in_gguf: bool = False) -> Executor:
    return load(mtp_zoo.gguf_file(name) if in_gguf else mtp_zoo.folder(name))


IN_FILES = [(name, False) for name in (*mtp_zoo.QWENS, *mtp_zoo.LATER_LAYERS)]
IN_FILES += [(name, True) for name in ("qwen3_5", "qwen3_next-experts")]


@pytest.mark.parametrize(("name", "in_gguf"), IN_FILES)
def test_it_guesses_what_transformers_modules_say(name: str, in_gguf: bool) -> None:
    """Also behind a prompt in several chunks, and behind guesses that were wrong."""
    executor = loaded(name, in_gguf=in_gguf)
    driver, recorder = drafting(executor, max_num_batched_tokens=16)
    wanted = job(temperature=0.0)
    key = driver.add(wanted)[0]
    driver.run()
    tokens = [*wanted.prompt, *driver.tokens(key)]
    assert driver.sampled[key] == alone(executor, MAX_LENGTH, wanted, 0, EOS)[0]
    assert len(recorder.guesses) > 20
    for length, guesses in recorder.guesses:
        logits = mtp_zoo.oracle(name).logits(tokens[:length], len([g for g in guesses if g >= 0]))
        for guess, of_guess in zip(guesses, logits, strict=False):
            assert of_guess[guess] >= of_guess.max() - 1e-3


def check(driver: Driver, reference: Executor, jobs: list[Job]) -> None:
    """Run jobs together: all get what each gets alone without guesses."""
    keys = [driver.add(wanted) for wanted in jobs]
    driver.run()
    for wanted, choices in zip(jobs, keys, strict=True):
        for index, key in enumerate(choices):
            assert driver.sampled[key] == alone(reference, MAX_LENGTH, wanted, index, EOS)[0]


@functools.cache
def agreeing(name: str, *, with_mtp: bool = True) -> Executor:
    return load(mtp_zoo.agreeing_folder(name), with_mtp=with_mtp)


JOBS = [
    job(60, temperature=0.0),
    job(40, (*PROMPT[:20], 9), temperature=1.0, n=3),
    job(50, (3, 4), temperature=0.8, top_p=0.9, top_k=20, logit_bias={7: 5.0, 9: -100.0}),
    job(30, tuple(range(60, 160, 2)), temperature=0.0, min_tokens=20),
    job(40, (5, 6, 7), temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.1),
    dataclasses.replace(job(40, (9, 8), temperature=1.0), constraints=constraints(r"[\s\S]*")),
]


@pytest.mark.parametrize("name", ["qwen3_next-experts", "qwen3_5"])
def test_a_layer_that_knows_the_model_guesses_right_for_all_of_a_batch(name: str) -> None:
    """Also for forks, behind prompts in chunks, and behind what it has guessed itself."""
    driver, recorder = drafting(agreeing(name), max_num_batched_tokens=24)
    check(driver, agreeing(name, with_mtp=False), JOBS)
    guesses, num_right = right(driver)
    assert guesses > 100
    assert num_right > 0.7 * guesses
    assert max(len([token for token in row if token >= 0]) for _, row in recorder.guesses) == GUESSES


def test_preempted_sequences_are_guessed_for_again() -> None:
    name = "qwen3_5"
    driver, _ = drafting(agreeing(name), num_blocks=12, num_states=12)
    check(driver, agreeing(name, with_mtp=False), [job(60, (i, *PROMPT), seed=i) for i in range(3)])
    assert driver.scheduler.preemptions_total > 0
    guesses, num_right = right(driver)
    assert num_right > 0.6 * guesses > 20


def test_a_sequence_from_the_prefix_cache_is_guessed_for() -> None:
    name = "qwen3_5"
    driver, recorder = drafting(agreeing(name))
    first = job(40, tuple(range(5, 90)), temperature=0.0)
    check(driver, agreeing(name, with_mtp=False), [first])
    recorder.guesses.clear()
    before = right(driver)[1]
    check(driver, agreeing(name, with_mtp=False), [job(40, (*first.prompt[:70], 4, 5), temperature=0.0)])
    assert driver.scheduler.cached_prompt_tokens_total >= 64
    assert recorder.guesses
    assert right(driver)[1] > before


def test_what_is_not_known_is_not_guessed() -> None:
    """A sequence whose last hidden row is not kept gets no guess, and arrays that do not fit change nothing."""
    executor: Any = loaded("qwen3_5")
    greedy = SamplingBatch.greedy([20])
    table = np.array([[60, 61]], np.int32)  # blocks that nobody had
    at = np.array([19], np.int32)
    batch = StepBatch(
        token_ids=np.array([5], np.int32),
        positions=at,
        query_start=np.array([0, 1], np.int32),
        context_len=at + 1,
        block_tables=table,
        logits_rows=np.array([0], np.int32),
        sampling=greedy,
    )
    assert executor.guess(batch, np.array([3], np.int32)).tolist() == [[-1, -1, -1]]
    with pytest.raises(ValueError, match="one token of each sequence"):
        executor.guess(dataclasses.replace(batch, positions=at - 1), np.array([3], np.int32))
    with pytest.raises(ValueError, match="block table is too short"):
        executor.guess(batch, np.array([30], np.int32))


SUBJECTS: list[Any] = [
    ("qwen3_5", True, {"dtype": "bfloat16"}),
    ("glm4-moe", False, {"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": Quantization("int4")}),
    *(
        pytest.param(name, agrees, changed, marks=pytest.mark.sweep)
        for name, agrees, changed in [
            ("qwen3_5-experts", False, {"dtype": "float32", "kv_cache_dtype": "fp8_e5m2"}),
            ("deepseek-v3", False, {"dtype": "bfloat16"}),
            (
                "qwen3_next-experts",
                True,
                {"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": Quantization("int8")},
            ),
        ]
    ),
]


@pytest.mark.parametrize(("name", "agrees", "changed"), SUBJECTS, ids=str)
def test_any_company_gets_what_each_gets_alone_without_the_layer(
    name: str, agrees: bool, changed: dict[str, Any]
) -> None:
    """In two groups of threads, with weights and caches of any kind, whether its guesses are right or wrong."""
    folder = mtp_zoo.agreeing_folder(name) if agrees else mtp_zoo.folder(name)
    from tidewheel import _native

    cpus = [processor["cpu"] for processor in _native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("this machine has no 2 processors")
    tested = load(folder, f"{cpus[0]}|{cpus[1]}", **changed)
    recorders: list[Recorder] = []

    def make_drafter() -> MtpDrafter:
        recorders.append(Recorder(tested))
        return MtpDrafter(recorders[-1], GUESSES, most_context=50, clock=lambda: 0.0)  # type: ignore[arg-type]

    check_any_company(
        tested,
        load(folder, with_mtp=False, **changed),
        jobs(),
        max_length=64,
        eos_ids=EOS,
        num_blocks=st.integers(4, 12),
        num_batched_tokens=st.sampled_from([8, 13, 50, 64]),
        max_examples=6,
        make_drafter=make_drafter,
    )
    assert sum(len(recorder.guesses) for recorder in recorders) > 10


def adapter(seed: int) -> LoraAdapter:
    """One that changes queries, the tokens' rows and the logits."""
    rng = np.random.default_rng(seed)

    def update(name: str, inputs: int, outputs: int) -> LowRankUpdate:
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, inputs), (outputs, 2)))
        return LowRankUpdate(name, a, b, 0.5)

    config = mtp_zoo.oracle("qwen3_5").model.config
    hidden, vocab = config.hidden_size, config.vocab_size
    queries = config.num_attention_heads * config.head_dim
    updates = (update("layers.1.q", hidden, queries), update("embed", vocab, hidden), update("head", hidden, vocab))
    return LoraAdapter(updates)


def test_sequences_with_adapters_are_guessed_for() -> None:
    limits = LoraLimits(max_loras=2, max_rank=2, dtype="float32")
    folder = mtp_zoo.agreeing_folder("qwen3_5")
    tested, reference = (load(folder, with_mtp=with_mtp, lora=limits) for with_mtp in (True, False))
    loras = [Lora(number, f"digest {number}") for number in range(2)]
    for executor in (tested, reference):
        assert isinstance(executor, LoraExecutor)
        for lora in loras:
            executor.load_lora(lora.number, adapter(lora.number))
    driver, recorder = drafting(tested)
    wanted = [
        dataclasses.replace(job(40, (*PROMPT[:20], 9), seed=seed, temperature=temperature), lora=lora)
        for seed, lora in enumerate([None, *loras])
        for temperature in (0.0, 1.0)
    ]
    check(driver, reference, wanted)
    assert len(recorder.guesses) > 60
    guesses, num_right = right(driver)
    assert num_right > 0.5 * guesses
