"""Constrained sequences: they keep to their constraint, end where it ends, and depend on the request alone."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import models_zoo
import pytest
from engine.constraints.grammars import grammar
from engine.driving import Driver, Job, alone, check_any_company
from engine.fake_executor import FakeExecutor
from engine.tiny_tokenizers import tiny
from harness import device_ids, make_device
from hypothesis import strategies as st
from samples import swept

from tidewheel.engine.constraints.constraint import Preface, TokenConstraints
from tidewheel.engine.constraints.filters import bad_word_tokens
from tidewheel.engine.constraints.thinking_budget import ThinkingBudget
from tidewheel.engine.devices.batch import StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorLimits, ExecutorOptions
from tidewheel.engine.models import describe
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.scheduler import Finished
from tidewheel.engine.weights import open_weights, read_config

pytest.importorskip("llguidance")  # not there on every machine

VOCAB_SIZE = 320
EOS = frozenset({1})  # of the byte-level tokenizer
MAX_LENGTH = 96
TOKENIZER = tiny("byte-level")
_TORCH, _BEST, *_OTHERS = device_ids()
# Levels differ in how they sample under a mask, which tests/engine/devices/test_sampling.py tests on each.
DEVICES = [_TORCH, _BEST, *(pytest.param(name, marks=pytest.mark.sweep) for name in _OTHERS)]
ROOMY = ExecutorLimits(4, 128, 8, 64)

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
GRAMMARS = {
    "json": ("json_schema", json.dumps(SCHEMA), None),
    "choice": ("choice", '["ebb", "ebb tide", "flood"]', "ebb|ebb tide|flood"),
    "regex": ("regex", "[a-f]{2,9}(, [a-f]+)*", "[a-f]{2,9}(, [a-f]+)*"),
    "empty": ("regex", "", ""),
}
THINKING = [
    ThinkingBudget(3, ("<",), (">a",), tuple(TOKENIZER.encode(">a", add_special_tokens=False)), is_open=True),
    ThinkingBudget(2, ("a", "b", "c"), (">",), tuple(TOKENIZER.encode(">", add_special_tokens=False)), repeats=True),
]


def constraints(name: str | None = None, **others: Any) -> TokenConstraints:
    if name is None:
        return TokenConstraints(**others)
    kind, source, _ = GRAMMARS[name]
    return TokenConstraints(grammar=grammar(kind, source, VOCAB_SIZE, EOS), **others)


def run(executor: Executor, wanted: TokenConstraints, **sampling: Any) -> tuple[list[int], Finished]:
    driver = Driver(executor, MAX_LENGTH, EOS)
    (key,) = driver.add(Job((5, 6, 7), SamplingParams(**{"max_tokens": 60, **sampling}), constraints=wanted))
    driver.run()
    return driver.tokens(key), driver.finished[key]


def fake() -> FakeExecutor:
    return FakeExecutor(ROOMY, VOCAB_SIZE)


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode([token for token in tokens if token not in EOS])


def assert_matches(name: str, text: str) -> None:
    pattern = GRAMMARS[name][2]
    if pattern is None:
        assert isinstance(json.loads(text)["n"], int)
    else:
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", [{}, {"ignore_eos": True}, {"min_tokens": 30}, {"min_tokens": 7, "n": 1}], ids=str)
def test_an_answer_that_stops_matches(name: str, sampling: dict[str, Any]) -> None:
    stopped = 0
    for seed in range(4):
        tokens, end = run(fake(), constraints(name), seed=seed, temperature=1.0, logit_bias={seed: 0.5}, **sampling)
        if end.reason is FinishReason.STOP:
            assert (end.stop_reason, end.error) == (None, None)
            assert_matches(name, text_of(tokens))
            stopped += 1
        else:
            assert end.reason is FinishReason.LENGTH
            assert len(tokens) == 60
    assert stopped or (name == "regex" and sampling)


def test_a_complete_grammar_ends_the_answer_without_another_token() -> None:
    for sampling in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        tokens, end = run(fake(), constraints("json"), **sampling)
        if end.reason is FinishReason.STOP:
            assert not EOS & set(tokens)
            assert end.is_complete
            assert text_of(tokens).endswith("}")


def test_where_a_grammar_may_go_on_an_ignored_or_early_end_is_not_taken() -> None:
    for sampling in ({"ignore_eos": True}, {"min_tokens": 60}):
        for seed in range(5):
            tokens, end = run(fake(), constraints("regex"), logit_bias={1: 100.0, seed: 1.0}, **sampling)
            assert len(tokens) == 60
            assert not EOS & set(tokens)
            assert end.reason is FinishReason.LENGTH
    tokens, _ = run(fake(), constraints("regex"), min_tokens=20, stop_token_ids=[*range(60, 70)])
    assert len(tokens) >= 20
    assert not set(range(60, 70)) & set(tokens[:20])


@pytest.mark.parametrize("name", DEVICES)
def test_a_bias_cannot_lift_a_mask_and_chooses_among_what_it_leaves(name: str) -> None:
    wanted = TokenConstraints(allowed_token_ids=(50, 60, 70))
    for temperature in (0.0, 1.0):
        for bias, expected in (({40: 100.0}, {50, 60, 70}), ({40: 100.0, 60: 100.0}, {60}), ({50: -100.0}, {60, 70})):
            tokens, end = run(
                executor(name), wanted, logit_bias=bias, max_tokens=20, temperature=temperature, logprobs=3
            )
            assert set(tokens) <= expected
            assert (len(tokens), end.reason) == (20, FinishReason.LENGTH)


def test_constraints_hold_together_and_an_empty_rest_is_an_error() -> None:
    letters = tuple(range(VOCAB_SIZE))
    bad = bad_word_tokens(TOKENIZER, ["b"])
    tokens, _ = run(fake(), constraints("regex", allowed_token_ids=letters, bad_words=bad), ignore_eos=True)
    assert re.fullmatch("[a-f, ]*", text_of(tokens))
    (b,) = TOKENIZER.encode("b", add_special_tokens=False)
    assert b not in tokens
    tokens, end = run(fake(), constraints("choice", allowed_token_ids=(1, 2, 3)))
    assert (tokens, end.reason) == ([-1], FinishReason.INVALID)
    assert (end.error or "").startswith("allowed_token_ids and the structured output contradict each other")
    _, end = run(fake(), constraints(allowed_token_ids=(1,)), min_tokens=3)
    assert end.reason is FinishReason.INVALID
    assert (end.error or "").startswith("allowed_token_ids and min_tokens contradict each other")


class Reasoner(FakeExecutor):
    """Samples the tokens of `script` first, and asserts that from its second one on only the end is forbidden."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(ROOMY, VOCAB_SIZE)
        self.script = script

    def step(self, batch: StepBatch) -> StepOutput:
        output = super().step(batch)
        place = int(batch.sampling.position[0]) - 3
        if place < len(self.script):
            masks = batch.sampling.masks
            assert masks is not None
            forbidden = [t for t in range(VOCAB_SIZE) if not masks.bits[0, t // 32] >> (t % 32) & 1]
            assert place == 0 or forbidden == sorted(EOS)
            output.token_ids[0] = self.script[place]
        return output


@pytest.mark.parametrize("closing", ["</think>", "</ä>", "|"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_grammar_begins_behind_the_reasoning(closing: str, is_open: bool) -> None:
    """Before that everything is allowed, also what looks like the tag for a while."""
    (late,) = TOKENIZER.encode("<|late|>", add_special_tokens=False)[:1]
    opening_id = 299  # of no text that the grammar knows
    assert late != opening_id
    said = TOKENIZER.encode(f"I think {closing[:-1]} that {closing[:-1]}{closing}", add_special_tokens=False)
    script = said if is_open else [opening_id, *said]
    wanted = constraints("choice", preface=Preface((closing,), is_open, opening_id))
    for seed in range(4):
        tokens, end = run(Reasoner(script), wanted, seed=seed)
        assert tokens[: len(script)] == script
        assert_matches("choice", text_of(tokens[len(script) :]))
        assert end.reason is FinishReason.STOP


@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 9}, {"ignore_eos": True}], ids=str)
def test_an_answer_cannot_end_within_the_reasoning(sampling: dict[str, Any]) -> None:
    """Even if the model wants nothing else: what the grammar demands is still owed."""
    for preface in (Preface(("</think>",), is_open=True), Preface(("</think>",), opening_id=299)):
        wants_to_end = {1: 100.0} if preface.is_open else {1: 90.0, 299: 100.0}
        tokens, end = run(fake(), constraints("empty", preface=preface), logit_bias=wants_to_end, **sampling)
        assert not EOS & set(tokens)
        assert (len(tokens), end.reason) == (60, FinishReason.LENGTH)
    wanted = constraints("choice", preface=Preface(("|",), is_open=True), allowed_token_ids=(1,))
    _, end = run(fake(), wanted, **sampling)
    assert end.reason is FinishReason.INVALID
    assert (end.error or "").startswith("allowed_token_ids and the structured output contradict each other")


def test_without_reasoning_the_grammar_rules_from_the_start() -> None:
    """The first token is the grammar's or opens a reasoning; after that there is no way back to one."""
    opened = 0
    for seed in range(20):
        wanted = constraints("choice", preface=Preface(("|",), opening_id=299))
        tokens, _ = run(fake(), wanted, seed=seed, logit_bias={seed: 1.0})
        opened += tokens[0] == 299
        if tokens[0] != 299:
            assert_matches("choice", text_of(tokens))
            assert 299 not in tokens
    assert 0 < opened < 20


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stem = draw(st.integers(0, 30))
    tail = draw(st.lists(st.integers(2, 300), min_size=0 if stem else 1, max_size=4))
    sampling = SamplingParams(
        max_tokens=draw(st.sampled_from([None, 1, 9, 40])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        logit_bias=draw(st.sampled_from([{}, {30: 5.0, 90: -100.0}])),
        ignore_eos=draw(st.booleans()),
        n=draw(st.sampled_from([1, 1, 3])),
        logprobs=draw(st.sampled_from([None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )
    name = draw(st.sampled_from([None, *GRAMMARS]))
    wanted = constraints(
        name,
        preface=draw(st.sampled_from([None, None, Preface(("a",), is_open=True), Preface(("e",), opening_id=90)])),
        allowed_token_ids=draw(st.sampled_from([None, None, tuple(range(0, VOCAB_SIZE, 2)), tuple(range(300))])),
        bad_words=draw(st.sampled_from([(), ((40,), (41, 42), (42, 41, 40))])),
        thinking=draw(st.sampled_from([None, *THINKING])),
    )
    prompt = (*((7 * i) % 300 + 4 for i in range(stem)), *tail)
    return Job(prompt, sampling, draw(st.integers(0, 2**64 - 1)), constraints=draw(st.sampled_from([wanted, None])))


@functools.cache
def executor(name: str) -> Executor:
    """The fake device, or a model of random weights on a real one."""
    if name == "fake":
        return FakeExecutor(ExecutorLimits(16, 64, 8, 128), VOCAB_SIZE)
    folder = models_zoo.folder("llama")
    description = describe(read_config(folder), None)
    device = make_device(name)
    options = ExecutorOptions(
        dtype="float32",
        kv_cache_bytes=64 * 16 * device.kv_bytes_per_token(description.spec, "float32"),
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )
    return device.load(description.spec, open_weights(folder, description), options)


@pytest.mark.parametrize("name", ["fake", *DEVICES])
def test_any_company_gives_the_same_bits(name: str) -> None:
    pytest.importorskip("transformers")
    check_any_company(
        executor(name),
        executor(name),
        jobs(),
        max_length=MAX_LENGTH,
        eos_ids=EOS,
        num_blocks=st.integers(6, 12),
        num_batched_tokens=st.sampled_from([8, 50, 128]),
        max_examples={"fake": 6, "torch": 2}.get(name, 5),
    )


@pytest.mark.parametrize("name", ["fake", *DEVICES[1:]])
def test_preemption_leaves_constraints_alone(name: str) -> None:
    tested = executor(name)
    limits = dataclasses.replace(tested.limits, num_blocks=7)
    driver = Driver(tested, MAX_LENGTH, EOS, limits=limits)
    sampling = SamplingParams(max_tokens=50, ignore_eos=True, n=2, logprobs=1)
    preface = Preface(("a",), is_open=True)
    wanted = [constraints("regex"), None, constraints("regex", preface=preface), constraints("json")]
    jobs = [Job((5, 6, i), sampling, seed=i, constraints=constraint) for i, constraint in enumerate(wanted)]
    owners = {key: (job, index) for job in jobs for index, key in enumerate(driver.add(job))}
    driver.run()
    assert driver.scheduler.preemptions_total > 3
    for key, (job, index) in owners.items():
        assert driver.sampled[key] == alone(tested, MAX_LENGTH, job, index, EOS)[0]


@pytest.mark.parametrize("name", ["fake", swept(_TORCH), *DEVICES[1:]])
def test_choices_of_one_prompt_each_keep_to_the_grammar_from_their_first_token(name: str) -> None:
    """They start from one computed prompt, whose scored rows have no masks."""
    tested = executor(name)
    sampling = SamplingParams(max_tokens=10 if name == "torch" else 40, n=3, logprobs=0, prompt_logprobs=1)
    wanted = {kind: constraints(kind, bad_words=((300,),)) for kind in ("json", "choice", "regex")}
    jobs: dict[str | None, Job] = {None: Job(tuple(range(20, 40)), sampling)}
    jobs |= {kind: dataclasses.replace(jobs[None], constraints=demanded) for kind, demanded in wanted.items()}
    driver = Driver(tested, MAX_LENGTH, EOS, limits=dataclasses.replace(tested.limits, max_num_seqs=7))
    keys_of = {kind: driver.add(job) for kind, job in jobs.items()}
    driver.run()
    stopped = 0
    for kind, keys in keys_of.items():
        for index, key in enumerate(keys):
            assert (driver.sampled[key], driver.scored[key]) == alone(tested, MAX_LENGTH, jobs[kind], index, EOS)
            if kind is not None and driver.finished[key].reason is FinishReason.STOP:
                assert_matches(kind, text_of(driver.tokens(key)))
                stopped += 1
        assert kind == "choice" or len({tuple(driver.tokens(key)) for key in keys}) > 1
        assert [position for position, *_ in driver.scored[keys[0]]] == list(range(19))
    assert stopped > 2


@pytest.mark.parametrize("name", DEVICES)
def test_a_failure_to_write_masks_is_the_steps_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(num_threads: int) -> None:
        raise RuntimeError("no masks today")

    monkeypatch.setattr("llguidance.LLExecutor", fail)
    driver = Driver(executor(name), MAX_LENGTH, EOS)
    driver.add(Job((5, 6, 7), SamplingParams(), constraints=constraints("json")))
    with pytest.raises(RuntimeError, match="no masks today"):
        driver.run()


def test_a_failure_of_llguidance_is_that_of_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, num_threads: int) -> None:
            pass

        def unsafe_compute_mask_ptr(self, *arguments: object) -> None:
            raise BaseException("panic")

    monkeypatch.setattr("llguidance.LLExecutor", Broken)
    driver = Driver(fake(), MAX_LENGTH, EOS)
    job = Job((5, 6, 7), SamplingParams(max_tokens=5, ignore_eos=True))
    keys = [
        driver.add(dataclasses.replace(job, constraints=wanted))[0]
        # Two, for a mask by itself needs no executor.
        for wanted in (constraints("json"), constraints("json"), None, TokenConstraints(allowed_token_ids=(40, 50)))
    ]
    driver.run()
    ends = [driver.finished[key] for key in keys]
    assert [end.reason for end in ends] == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH] * 2
    assert "llguidance has failed" in (ends[0].error or "")
