"""Layers for drafts, a checkpoint's own (MTP) or EAGLE3's, draft what their definition says, and change no token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import eagle3_zoo
import mtp_zoo
import numpy as np
import pytest
from engine.driving import Driver, Job, alone, check_any_company
from engine.speculation.layer_drafts import (
    DRAFT_TOKENS,
    EOS,
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
from samples import swept

from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.models import describe
from tidewheel.engine.speculation.mtp import MtpDrafter
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.eagle3 import open_eagle3
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate
from tidewheel.engine.weights.quantization import Quantization

require_packages("transformers")
pytest.importorskip("llguidance")  # not there on every machine
native: Any = pytest.importorskip("tidewheel._native")


class Mtp(NamedTuple):
    """A model with a layer of its own. One that agrees was made so that the layer is often right."""

    name: str
    agrees: bool = False
    in_gguf: bool = False

    def oracle(self) -> Any:
        return mtp_zoo.oracle(self.name)

    def load(self, threads_bind: str = "0,0", *, with_layer: bool = True, **changed: Any) -> Executor:
        make = mtp_zoo.gguf_file if self.in_gguf else mtp_zoo.agreeing_folder if self.agrees else mtp_zoo.folder
        source = open_source(str(make(self.name)))
        description = describe(source.config, None)
        description = description.with_mtp() if with_layer else description
        return _load(description.spec, source.weights(description, source.config), threads_bind, changed)


class Eagle3(NamedTuple):
    """A model with an EAGLE3 layer beside it."""

    name: str
    agrees: bool = False

    def oracle(self) -> Any:
        return eagle3_zoo.oracle(self.name)

    def load(self, threads_bind: str = "0,0", *, with_layer: bool = True, **changed: Any) -> Executor:
        folder, layer_folder = eagle3_zoo.agreeing_folders() if self.agrees else eagle3_zoo.folders(self.name)
        source = open_source(str(folder))
        description = describe(source.config, None)
        spec, weights = description.spec, source.weights(description, source.config)
        if with_layer:
            layer = open_eagle3(str(layer_folder), None, None, spec)
            spec, weights = dataclasses.replace(spec, eagle3=layer.spec), layer.beside(weights)
        return _load(spec, weights, threads_bind, changed)


def _load(spec: Any, weights: Any, threads_bind: str, changed: dict[str, Any]) -> Executor:
    device = make_device(f"cpu-{native.chosen_isa_level('auto')}", threads_bind)
    return device.load(spec, weights, dataclasses.replace(OPTIONS, **changed))


Layer = Mtp | Eagle3
QWEN = Mtp("qwen3_5", agrees=True)


@functools.cache
def loaded(layer: Layer, *, with_layer: bool = True) -> Executor:
    return layer.load(with_layer=with_layer)


def name_of(value: Any) -> str:
    return "-".join(map(str, (type(value).__name__, *value))) if isinstance(value, Mtp | Eagle3) else str(value)


DEFINED: list[Layer] = [Mtp(name) for name in (*mtp_zoo.QWENS, *mtp_zoo.LATER_LAYERS)]
DEFINED += [Mtp(name, in_gguf=True) for name in ("qwen3_5", "qwen3_next-experts")]
DEFINED += [Eagle3(name) for name in eagle3_zoo.KINDS]


@pytest.mark.parametrize("layer", DEFINED, ids=name_of)
def test_it_drafts_what_its_definition_says(layer: Layer) -> None:
    """Also behind a prompt in several chunks, and behind draft tokens that were rejected."""
    driver, recorder = drafting(loaded(layer), max_num_batched_tokens=16)
    wanted = job(temperature=0.0)
    key = driver.add(wanted)[0]
    driver.run()
    tokens = [*wanted.prompt, *driver.tokens(key)]
    assert driver.sampled[key] == alone(loaded(layer), MAX_LENGTH, wanted, 0, EOS)[0]
    assert len(recorder.draft_tokens) > 20
    for length, draft_tokens in recorder.draft_tokens:
        logits = layer.oracle().logits(tokens[:length], len([g for g in draft_tokens if g >= 0]))
        for draft, of_draft in zip(draft_tokens, logits, strict=False):
            assert of_draft[draft] >= of_draft.max() - 1e-3


def check(driver: Driver, reference: Executor, jobs: list[Job]) -> tuple[int, int]:
    """Run jobs together: all get what each gets alone without draft tokens.

    How many of those there were, and right ones.
    """
    keys = [driver.add(wanted) for wanted in jobs]
    driver.run()
    for wanted, choices in zip(jobs, keys, strict=True):
        for index, key in enumerate(choices):
            assert driver.sampled[key] == alone(reference, MAX_LENGTH, wanted, index, EOS)[0]
    return right(driver)


JOBS = [
    job(60, temperature=0.0),
    job(40, (*PROMPT[:20], 9), temperature=1.0, n=3),
    job(50, (3, 4), temperature=0.8, top_p=0.9, top_k=20, logit_bias={7: 5.0, 9: -100.0}),
    job(30, tuple(range(60, 160, 2)), temperature=0.0, min_tokens=20),
    job(40, (5, 6, 7), temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.1),
    dataclasses.replace(job(40, (9, 8), temperature=1.0), constraints=constraints(r"[\s\S]*")),
]


@pytest.mark.parametrize(
    ("layer", "min_right"),
    [(Mtp("qwen3_next-experts", agrees=True), 0.7), (QWEN, 0.7), (Eagle3("llama", agrees=True), 0.5)],
    ids=name_of,
)
def test_drafts_of_a_layer_that_knows_the_model_are_accepted_for_all_of_a_batch(layer: Layer, min_right: float) -> None:
    """Also for forks, behind prompts in chunks, under a grammar, with penalties, and behind its own draft tokens."""
    driver, recorder = drafting(loaded(layer), max_num_batched_tokens=24)
    draft_tokens, num_accepted = check(driver, loaded(layer, with_layer=False), JOBS)
    assert draft_tokens > 100
    assert num_accepted > min_right * draft_tokens
    assert max(len([token for token in row if token >= 0]) for _, row in recorder.draft_tokens) == DRAFT_TOKENS


AGREEING = [QWEN, Eagle3("llama", agrees=True)]


@pytest.mark.parametrize("layer", AGREEING, ids=name_of)
def test_preempted_sequences_are_drafted_for_again(layer: Layer) -> None:
    tested = loaded(layer)
    driver, _ = drafting(tested, num_blocks=12, num_states=min(12, tested.limits.num_states))
    wanted = [job(60, (i, *PROMPT), seed=i, temperature=0.0) for i in range(3)]
    draft_tokens, num_accepted = check(driver, loaded(layer, with_layer=False), wanted)
    assert driver.scheduler.preemptions_total > 0
    assert num_accepted > 0.5 * draft_tokens > 10


@pytest.mark.parametrize("layer", AGREEING, ids=name_of)
def test_a_sequence_from_the_prefix_cache_is_drafted_for(layer: Layer) -> None:
    driver, recorder = drafting(loaded(layer))
    reference = loaded(layer, with_layer=False)
    first = job(40, tuple(range(5, 90)), temperature=0.0)
    _, before = check(driver, reference, [first])
    recorder.draft_tokens.clear()
    _, num_accepted = check(driver, reference, [job(40, (*first.prompt[:70], 4, 5), temperature=0.0)])
    assert driver.scheduler.cached_prompt_tokens_total >= 64
    assert recorder.draft_tokens
    assert num_accepted > before


def test_what_is_not_known_is_not_drafted() -> None:
    """A sequence whose last hidden row is not kept gets no draft token, and arrays that do not fit change nothing."""
    executor: Any = loaded(Mtp("qwen3_5"))
    greedy = SamplingBatch.greedy([20])
    table = np.array([[60, 61]], np.int32)  # blocks that were never used
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
    assert executor.draft(batch, np.array([3], np.int32)).tolist() == [[-1, -1, -1]]
    with pytest.raises(ValueError, match="one token of each sequence"):
        executor.draft(dataclasses.replace(batch, positions=at - 1), np.array([3], np.int32))
    with pytest.raises(ValueError, match="block table is too short"):
        executor.draft(batch, np.array([30], np.int32))


INT4, INT8 = Quantization("int4-fast"), Quantization("int8")
SUBJECTS: list[Any] = [
    (QWEN, {"dtype": "bfloat16"}),
    (Mtp("glm4-moe"), {"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": INT4}),
    (Eagle3("speculator"), {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "quantization": INT4}),
    swept(Mtp("qwen3_5-experts"), {"dtype": "float32", "kv_cache_dtype": "fp8_e5m2"}),
    swept(Mtp("deepseek-v3"), {"dtype": "bfloat16"}),
    swept(
        Mtp("qwen3_next-experts", agrees=True), {"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": INT8}
    ),
    swept(Eagle3("llama", agrees=True), {"dtype": "bfloat16"}),
    swept(Eagle3("qwen3"), {"dtype": "float32", "kv_cache_dtype": "int8", "quantization": INT8}),
]


# Two groups of threads wait for each other at each step of each example.
@pytest.mark.parametrize(("layer", "changed"), SUBJECTS, ids=name_of)
def test_any_company_gets_what_each_gets_alone_without_the_layer(layer: Layer, changed: dict[str, Any]) -> None:
    """In two groups of threads, with weights and caches of any kind, whether its draft tokens are accepted or wrong."""
    cpus = [processor["cpu"] for processor in native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("this machine has no 2 processors")
    tested = layer.load(f"{cpus[0]}|{cpus[1]}", **changed)
    recorders: list[Recorder] = []

    def make_drafter() -> MtpDrafter:
        recorders.append(Recorder(tested))
        return MtpDrafter(recorders[-1], DRAFT_TOKENS, max_context=50, clock=lambda: 0.0)  # type: ignore[arg-type]

    check_any_company(
        tested,
        layer.load(with_layer=False, **changed),
        jobs(),
        max_length=64,
        eos_ids=EOS,
        num_blocks=st.integers(4, 12),
        num_batched_tokens=st.sampled_from([8, 13, 50, 64]),
        max_examples=6,
        make_drafter=make_drafter,
    )
    assert sum(len(recorder.draft_tokens) for recorder in recorders) > 5


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


def test_sequences_with_adapters_are_drafted_for() -> None:
    limits = LoraLimits(max_loras=2, max_rank=2, dtype="float32")
    tested, reference = (QWEN.load(with_layer=with_layer, lora=limits) for with_layer in (True, False))
    loras = [Lora(number, f"digest {number}") for number in range(2)]
    for executor in (tested, reference):
        for lora in loras:
            executor.load_lora(lora.number, adapter(lora.number))
    driver, recorder = drafting(tested)
    wanted = [
        dataclasses.replace(job(40, (*PROMPT[:20], 9), seed=seed, temperature=temperature), lora=lora)
        for seed, lora in enumerate([None, *loras])
        for temperature in (0.0, 1.0)
    ]
    draft_tokens, num_accepted = check(driver, reference, wanted)
    assert len(recorder.draft_tokens) > 60
    assert num_accepted > 0.5 * draft_tokens
