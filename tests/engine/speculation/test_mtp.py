"""A checkpoint's own layer for drafts (MTP): it guesses what transformers' modules say, and changes no token."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import mtp_zoo
import numpy as np
import pytest
from engine.driving import Driver, Job, alone
from harness import make_device
from numpy.typing import NDArray

from tidewheel.engine.devices.base import Executor, ExecutorOptions
from tidewheel.engine.devices.batch import StepBatch
from tidewheel.engine.models import describe
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.mtp import MtpDrafter
from tidewheel.engine.weights import open_weights, read_config

pytest.importorskip("transformers")
pytest.importorskip("tidewheel._native")

MAX_LENGTH = 160  # tokens, prompt and output together
PROMPT = tuple(range(40, 77))
GUESSES = 3

OPTIONS = ExecutorOptions(
    dtype="float32",
    kv_cache_bytes=None,
    max_model_len=256,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    num_blocks=64,
    mtp_guesses=GUESSES,
)


def load(folder: Path, threads_bind: str = "0,0", **changed: Any) -> Executor:
    from tidewheel import _native

    description = describe(read_config(folder), None).with_mtp()
    device = make_device(f"cpu-{_native.chosen_isa_level('auto')}", threads_bind)
    return device.load(description.spec, open_weights(folder, description), dataclasses.replace(OPTIONS, **changed))


@functools.cache
def loaded(name: str) -> Executor:
    return load(mtp_zoo.folder(name))


class Recorder:
    """The executor's guesses, each with how many tokens its sequence had."""

    def __init__(self, executor: Any) -> None:
        self.limits = executor.limits
        self.copy_blocks = executor.copy_blocks
        self.guesses: list[tuple[int, list[int]]] = []
        self._executor = executor

    def guess(self, batch: StepBatch, counts: NDArray[np.int32], least_probability: float = 0.0) -> NDArray[np.int32]:
        guesses: NDArray[np.int32] = self._executor.guess(batch, counts, least_probability)
        for length, row in zip(batch.context_len.tolist(), guesses.tolist(), strict=True):
            self.guesses.append((length, row))
        return guesses


def drafting(executor: Executor, num_tokens: int = GUESSES, **limits: Any) -> tuple[Driver, Recorder]:
    """An engine whose guesses seem to take no time."""
    recorder = Recorder(executor)
    drafter = MtpDrafter(recorder, num_tokens, most_context=1000, clock=lambda: 0.0)
    narrowed = dataclasses.replace(executor.limits, **limits)
    driver = Driver(executor, MAX_LENGTH, clock=lambda step: 5.0, drafter=drafter, limits=narrowed)  # type: ignore[arg-type]
    return driver, recorder


def job(max_tokens: int = 30, prompt: tuple[int, ...] = PROMPT, seed: int = 11, **sampling: Any) -> Job:
    return Job(prompt, SamplingParams(max_tokens=max_tokens, logprobs=2, ignore_eos=True, **sampling), seed)


@pytest.mark.parametrize("name", mtp_zoo.QWENS)
def test_it_guesses_what_transformers_modules_say(name: str) -> None:
    """Also behind a prompt in several chunks, and behind guesses that were wrong."""
    driver, recorder = drafting(loaded(name), max_num_batched_tokens=16)
    wanted = job(temperature=0.0)
    key = driver.add(wanted)[0]
    driver.run()
    tokens = [*wanted.prompt, *driver.tokens(key)]
    assert driver.sampled[key] == alone(loaded(name), MAX_LENGTH, wanted, 0, frozenset())[0]
    assert len(recorder.guesses) > 20
    for length, guesses in recorder.guesses:
        logits = mtp_zoo.oracle(name).logits(tokens[:length], len([g for g in guesses if g >= 0]))
        for guess, of_guess in zip(guesses, logits, strict=False):
            assert of_guess[guess] >= of_guess.max() - 1e-3
