"""EAGLE3 layers: they guess what their definition says, and change no token."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import eagle3_zoo
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

from tidewheel.engine.devices.base import Executor
from tidewheel.engine.models import describe
from tidewheel.engine.speculation.mtp import MtpDrafter
from tidewheel.engine.weights import open_weights, read_config
from tidewheel.engine.weights.eagle3 import open_eagle3
from tidewheel.engine.weights.quantization import Quantization

require_packages("transformers")
pytest.importorskip("llguidance")  # not there on every machine
pytest.importorskip("tidewheel._native")


def load(folders: tuple[Path, Path], threads_bind: str = "0,0", *, with_layer: bool = True, **changed: Any) -> Executor:
    from tidewheel import _native

    folder, layer_folder = folders
    description = describe(read_config(folder), None)
    spec, weights = description.spec, open_weights(folder, description)
    if with_layer:
        layer = open_eagle3(str(layer_folder), None, None, spec)
        spec, weights = dataclasses.replace(spec, eagle3=layer.spec), layer.beside(weights)
    device = make_device(f"cpu-{_native.chosen_isa_level('auto')}", threads_bind)
    return device.load(spec, weights, dataclasses.replace(OPTIONS, **changed))


@functools.cache
def loaded(name: str) -> Executor:
    return load(eagle3_zoo.folders(name))


@functools.cache
def agreeing(*, with_layer: bool = True) -> Executor:
    return load(eagle3_zoo.agreeing_folders(), with_layer=with_layer)


@pytest.mark.parametrize("name", eagle3_zoo.KINDS)
def test_it_guesses_what_its_definition_says(name: str) -> None:
    """Also behind a prompt in several chunks, and behind guesses that were wrong."""
    driver, recorder = drafting(loaded(name), max_num_batched_tokens=16)
    wanted = job(temperature=0.0)
    key = driver.add(wanted)[0]
    driver.run()
    tokens = [*wanted.prompt, *driver.tokens(key)]
    assert driver.sampled[key] == alone(loaded(name), MAX_LENGTH, wanted, 0, EOS)[0]
    assert len(recorder.guesses) > 20
    for length, guesses in recorder.guesses:
        logits = eagle3_zoo.oracle(name).logits(tokens[:length], len([g for g in guesses if g >= 0]))
        for guess, of_guess in zip(guesses, logits, strict=False):
            assert of_guess[guess] >= of_guess.max() - 1e-3


def check(driver: Driver, jobs: list[Job]) -> tuple[int, int]:
    """Run jobs together: all get what each gets alone without guesses. How many of those there were, and right ones."""
    keys = [driver.add(wanted) for wanted in jobs]
    driver.run()
    for wanted, choices in zip(jobs, keys, strict=True):
        for index, key in enumerate(choices):
            assert driver.sampled[key] == alone(agreeing(with_layer=False), MAX_LENGTH, wanted, index, EOS)[0]
    return right(driver)


def test_a_layer_that_knows_the_model_guesses_right_for_all_of_a_batch() -> None:
    """Also for forks, behind prompts in chunks, under a grammar, with penalties, and behind its own guesses."""
    wanted = [
        job(60, temperature=0.0),
        job(40, (*PROMPT[:20], 9), temperature=1.0, n=3),
        job(50, (3, 4), temperature=0.8, top_p=0.9, top_k=20, logit_bias={7: 5.0, 9: -100.0}),
        job(40, (5, 6, 7), temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.1),
        dataclasses.replace(job(40, (9, 8), temperature=1.0), constraints=constraints(r"[\s\S]*")),
    ]
    driver, recorder = drafting(agreeing(), max_num_batched_tokens=24)
    guesses, num_right = check(driver, wanted)
    assert num_right > 0.5 * guesses > 50
    assert max(len([token for token in row if token >= 0]) for _, row in recorder.guesses) == GUESSES


def test_preempted_and_cached_sequences_are_guessed_for() -> None:
    driver, _ = drafting(agreeing(), num_blocks=12)
    guesses, num_right = check(driver, [job(60, (i, *PROMPT), seed=i, temperature=0.0) for i in range(3)])
    assert driver.scheduler.preemptions_total > 0
    assert num_right > 0.5 * guesses > 10
    driver, recorder = drafting(agreeing())
    first = job(40, tuple(range(5, 90)), temperature=0.0)
    check(driver, [first])
    recorder.guesses.clear()
    check(driver, [job(40, (*first.prompt[:70], 4, 5), temperature=0.0)])
    assert driver.scheduler.cached_prompt_tokens_total >= 64
    assert recorder.guesses


SUBJECTS: list[Any] = [
    pytest.param("agreeing", {"dtype": "bfloat16"}, marks=pytest.mark.sweep),
    ("speculator", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "quantization": Quantization("int4")}),
    pytest.param(
        "qwen3",
        {"dtype": "float32", "kv_cache_dtype": "int8", "quantization": Quantization("int8")},
        marks=pytest.mark.sweep,
    ),
]


@pytest.mark.parametrize(("name", "changed"), SUBJECTS, ids=str)
def test_any_company_gets_what_each_gets_alone_without_the_layer(name: str, changed: dict[str, Any]) -> None:
    """In two groups of threads, with weights and caches of any kind, whether its guesses are right or wrong."""
    from tidewheel import _native

    cpus = [processor["cpu"] for processor in _native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("this machine has no 2 processors")
    folders = eagle3_zoo.agreeing_folders() if name == "agreeing" else eagle3_zoo.folders(name)
    tested = load(folders, f"{cpus[0]}|{cpus[1]}", **changed)
    recorders: list[Recorder] = []

    def make_drafter() -> MtpDrafter:
        recorders.append(Recorder(tested))
        return MtpDrafter(recorders[-1], GUESSES, most_context=50, clock=lambda: 0.0)  # type: ignore[arg-type]

    check_any_company(
        tested,
        load(folders, with_layer=False, **changed),
        jobs(),
        max_length=64,
        eos_ids=EOS,
        num_blocks=st.integers(4, 12),
        num_batched_tokens=st.sampled_from([8, 13, 50, 64]),
        max_examples=5,
        make_drafter=make_drafter,
    )
    assert sum(len(recorder.guesses) for recorder in recorders) > 5
