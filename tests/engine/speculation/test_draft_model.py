"""A draft model changes no token and no log-probability, and the model itself, as its own draft, is always right."""

from __future__ import annotations

import functools
import random
from typing import Any

import models_zoo
import pytest
from engine.constraints.grammars import grammar
from engine.driving import Driver, Job, Oracle, alone, check_schedule, random_clock
from engine.tiny_tokenizers import tiny
from harness import make_device
from optional_packages import require_packages

from tidewheel.engine.constraints.constraint import Preface, TokenConstraints
from tidewheel.engine.devices.batch import StepBatch
from tidewheel.engine.devices.executor import DraftExecutor, Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models import describe
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.draft_model import ModelDrafter
from tidewheel.engine.weights import open_source

require_packages("transformers")
pytest.importorskip("llguidance")  # not there on every machine

MAX_LENGTH = 128  # tokens, prompt and output together
PROMPT = tuple(range(40, 77))
BLOCK = 16
EOS = frozenset({1})  # of the byte-level tokenizer


def options(num_blocks: int, num_batched_tokens: int) -> ExecutorOptions:
    return ExecutorOptions(
        dtype="bfloat16",
        kv_cache_bytes=None,
        max_model_len=MAX_LENGTH,
        max_num_seqs=8,
        max_num_batched_tokens=num_batched_tokens,
        num_blocks=num_blocks,
    )


def loaded(model: str, draft: str, num_blocks: int, num_batched_tokens: int) -> tuple[Executor, DraftExecutor]:
    device = make_device("cpu-" + best_level(), "0,0")
    parts = {}
    for name in {model, draft}:
        source = open_source(str(models_zoo.folder(name)))
        description = describe(source.config, MAX_LENGTH)
        parts[name] = description.spec, source.weights(description)
    asked = options(num_blocks, num_batched_tokens)
    executor = device.load(*parts[model], asked)
    return executor, device.load_draft(*parts[draft], asked, executor)


@functools.cache
def best_level() -> str:
    from tidewheel import _native

    return _native.chosen_isa_level("auto")


def drafting(
    draft: str = "llama",
    *,
    num_tokens: int = 5,
    num_blocks: int = 64,
    num_batched_tokens: int = 256,
    most: int = 1000,
    own_vocab_size: int = models_zoo.VOCAB_SIZE,
    computed: list[int] | None = None,
) -> Driver:
    """An engine of the model `llama` with a draft model, whose draft tokens seem to take no time.

    Each call of the draft model adds to `computed` how many tokens it was given.
    """
    executor, small = loaded("llama", draft, num_blocks, num_batched_tokens)
    if computed is not None:
        draft = small.draft

        def counting(batch: StepBatch, *rest: Any) -> Any:
            computed.append(len(batch.token_ids))
            return draft(batch, *rest)

        small.draft = counting  # type: ignore[method-assign]
    drafter = ModelDrafter(
        small,
        num_tokens,
        vocab_size=models_zoo.VOCAB_SIZE,
        own_vocab_size=own_vocab_size,
        max_context=most,
        clock=lambda: 0.0,
    )
    return Driver(executor, MAX_LENGTH, EOS, clock=lambda step: 5.0, drafter=drafter)


@functools.cache
def roomy() -> Executor:
    return loaded("llama", "llama-tied", 64, 256)[0]


def job(
    max_tokens: int = 40,
    prompt: tuple[int, ...] = PROMPT,
    constraints: TokenConstraints | None = None,
    **sampling: object,
) -> Job:
    asked = SamplingParams(max_tokens=max_tokens, logprobs=2, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Job(prompt, asked, seed=11, constraints=constraints)


def constraints(text: str, **more: Any) -> TokenConstraints:
    return TokenConstraints(grammar=grammar("regex", text, models_zoo.VOCAB_SIZE, EOS), **more)


def check(driver: Driver, jobs: list[Job]) -> None:
    """Run jobs together: all get what each gets alone without draft tokens."""
    keys = [driver.add(wanted) for wanted in jobs]
    driver.run()
    for wanted, choices in zip(jobs, keys, strict=True):
        for index, key in enumerate(choices):
            assert driver.sampled[key] == alone(roomy(), MAX_LENGTH, wanted, index, EOS)[0]


def right(driver: Driver) -> tuple[int, int]:
    """How many draft tokens there were, and how many of them were right."""
    assert driver.scheduler.drafts is not None
    stats = driver.scheduler.drafts.stats
    return stats.draft_tokens_total, stats.accepted_total


SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.0, "logit_bias": {7: 5.0, 9: -100.0}},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.7, "logit_bias": {7: 5.0}},
]


# What it says is computed once more without drafts.
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_all_drafts_of_the_model_itself_are_accepted(sampling: dict[str, object]) -> None:
    driver = drafting(num_tokens=5)
    check(driver, [job(**sampling)])
    draft_tokens, num_accepted = right(driver)
    assert draft_tokens == num_accepted >= 20
    assert len(driver.steps) <= 20


def test_it_drafts_under_a_grammar() -> None:
    """Forbidden tokens are cut, also beside forced tokens and reasoning. Where much is forbidden, others are drawn."""
    driver = drafting()
    free, forced = r"[\s\S]*", r"(high|low) tide at (noon|dusk), [\s\S]*"
    jobs = [job(temperature=1.0, constraints=constraints(free)), job(n=2, constraints=constraints(forced))]
    jobs.append(job(presence_penalty=0.5, constraints=constraints(free, bad_words=((40,), (41, 42)))))
    jobs.append(job(temperature=0.0, constraints=constraints(forced, preface=Preface(("a",), is_open=True))))
    check(driver, [*jobs, job()])
    drafts = [draft for step in driver.steps for draft in step.rows.drafts]
    assert {draft.sequence.key for draft in drafts} == {0, 1, 2, 3, 4, 5}
    draft_tokens, num_accepted = right(driver)
    assert draft_tokens >= num_accepted > 0.4 * draft_tokens > 40
    assert len(driver.steps) < 40


def test_draft_tokens_that_a_grammar_forbids_are_not_run() -> None:
    driver = drafting("llama-tied")
    check(driver, [job(60, temperature=1.5, constraints=constraints("[a-f]{40,60}"))])
    assert right(driver)[0] < 40
    drafts = [draft for step in driver.steps for draft in step.rows.drafts]
    assert all(set(tiny("byte-level").decode(draft.token_ids[1:])) <= set("abcdef") for draft in drafts)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(
    "asked",
    [
        constraints("[a-f]{40,60}"),
        constraints("[a-f]{40,60}", bad_words=((68,), (69,))),
        TokenConstraints(allowed_token_ids=tuple(range(70, 90))),
    ],
    ids=["grammar", "both", "allowed"],
)
def test_the_first_draft_is_one_that_is_allowed(asked: TokenConstraints, temperature: float) -> None:
    """So if the draft model is the model itself, its first draft token is right, whatever it drafts behind that."""
    driver = drafting()
    check(driver, [job(40, temperature=temperature, constraints=asked), job(20)])
    assert driver.scheduler.drafts is not None
    constrained = [draft for step in driver.steps for draft in step.rows.drafts if draft.sequence.key == 0]
    assert len(constrained) > 10
    assert driver.scheduler.drafts.stats.accepted_at[0] == driver.scheduler.drafts.stats.drafts_total


def test_masks_are_for_all_ids_of_a_draft_model_that_has_more() -> None:
    driver = drafting(own_vocab_size=models_zoo.VOCAB_SIZE + 64)
    check(driver, [job(40, temperature=1.0, constraints=constraints("[a-f]{40,60}"))])
    assert right(driver)[1] > 10


def test_its_drafts_are_accepted_for_all_of_a_batch() -> None:
    """With prompts that are alike, with forks that share blocks, and with those that come later."""
    driver = drafting()
    jobs = [job(prompt=(*PROMPT[:32], i)) for i in range(3)] + [job(n=3, temperature=1.0), job(9, PROMPT[:3])]
    check(driver, jobs)
    check(driver, [job(60, temperature=0.7), job(60, (5, 6, 7))])
    draft_tokens, num_accepted = right(driver)
    assert draft_tokens == num_accepted >= 100


def test_it_knows_what_it_has_computed_for_others() -> None:
    """If a prompt's blocks lie in the prefix cache, it computes no more of the prompt than the large model."""
    run: list[int] = []
    driver = drafting(computed=run)
    check(driver, [job(8)])
    assert max(run) > 2 * BLOCK
    run.clear()
    check(driver, [job(20, (*PROMPT[: 2 * BLOCK], 9, 9, 9))])
    assert run
    assert max(run) < BLOCK
    run.clear()
    assert isinstance(driver.drafter, ModelDrafter)
    driver.drafter.lose_cache()
    check(driver, [job(20, (*PROMPT[: 2 * BLOCK], 8, 8, 8))])
    assert max(run) > 2 * BLOCK


def test_drafts_of_preempted_sequences_are_accepted_again() -> None:
    driver = drafting(num_blocks=12, num_tokens=3)
    check(driver, [job(60, (i, *PROMPT)) for i in range(3)])
    assert driver.scheduler.preemptions_total > 0
    draft_tokens, num_accepted = right(driver)
    assert draft_tokens == num_accepted >= 40


def test_rejected_draft_tokens_change_nothing() -> None:
    driver = drafting("llama-tied")
    check(driver, [job(n=2, temperature=1.0), job(min_tokens=30), job(30, (1, 2), temperature=0.4)])
    draft_tokens, num_accepted = right(driver)
    assert num_accepted < draft_tokens


@pytest.mark.parametrize("seed", range(4))
def test_any_company_gets_what_each_gets_alone(seed: int) -> None:
    """Requests come and go at any time, in a pool that is too small and in steps of any length."""
    rng = random.Random(seed)
    draft = "llama" if seed % 2 else "llama-tied"
    tokens, blocks = rng.randint(1, 6), rng.randint(9, 20)
    driver = drafting(draft, num_tokens=tokens, num_blocks=blocks, num_batched_tokens=rng.choice([8, 16, 64]))
    driver.clock = random_clock(seed)
    moments = []
    for _ in range(8):
        length = rng.randint(1, 50)
        wanted = job(
            rng.randint(1, 60),
            PROMPT[:32][:length] + tuple(rng.choices(range(4, 300), k=max(length - 32, 1))),
            n=rng.choice([1, 1, 1, 3]),
            temperature=rng.choice([0.0, 1.0]),
            constraints=rng.choice([None, None, constraints(r"(ebb|flood) tide[\s\S]*")]),
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        moments.append(([wanted], [rng.randrange(12)] if rng.random() < 0.3 else []))
    check_schedule(driver, moments, roomy, Oracle(seed))
    draft_tokens, num_accepted = right(driver)
    assert num_accepted <= draft_tokens
    assert draft_tokens


def test_nothing_is_drafted_behind_the_draft_models_context() -> None:
    driver = drafting(most=60)
    check(driver, [job(60)])
    drafts = [draft for step in driver.steps for draft in step.rows.drafts]
    assert drafts
    assert max(draft.end for draft in drafts) <= 60
