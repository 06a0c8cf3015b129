"""A draft model beside the first stage of a pipeline, and the checkpoint's layer for drafts behind the last one: the
tokens of one process without them, in fewer steps.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import models_zoo
import mtp_zoo
import pytest
from cores import one_core
from engine.constraints.grammars import grammar
from engine.driving import Driver, Job, alone
from engine.pipeline.cases import answers, expected
from engine.pipeline.loaded import load_stages
from engine.pipeline.processes import children_of, kill_soon
from waiting import wait_until

from tidewheel import LLM
from tidewheel import SamplingParams as Params
from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.devices.executor import DraftExecutor, Executor
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.loading.drafts import open_draft
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline.draft import StagedLayer
from tidewheel.engine.pipeline.executor import PipelineExecutor
from tidewheel.engine.pipeline.links import DRAFT_HEAD
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.mtp import MtpDrafter
from tidewheel.engine.speculation.options import DraftModel, SpeculativeOptions

pytest.importorskip("llguidance")  # not there on every machine

MAX_LENGTH = 128
PROMPT = tuple(range(40, 77))
EOS = frozenset({1})
DRAFT_TOKENS = 3
LIMITS = {"max_model_len": MAX_LENGTH, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 64}


def options() -> EngineOptions:
    folder = str(models_zoo.folder("llama"))
    return EngineOptions(folder, device="cpu", pipeline=PipelineOptions(pipeline_parallel_size=2))


@functools.cache
def roomy() -> Executor:
    """One process, without a draft model."""
    model = open_model(options())
    return model.device.load(model.spec, model.weights, model.executor_options(None, **LIMITS))


@contextmanager
def drafting(draft: str = "llama") -> Iterator[Driver]:
    """An engine of two stages with a draft model, whose draft tokens seem to take no time."""
    given = options()
    model = open_model(given)
    opened = open_draft(given, DraftModel(str(models_zoo.folder(draft)), num_tokens=5), model)
    wanted = model.executor_options(None, **LIMITS)
    executor = load_stages(given, model, wanted, opened)
    try:
        assert executor.draft is not None
        drafter = opened.drafter(executor.draft, executor.limits, MAX_LENGTH, clock=lambda: 0.0)
        yield Driver(executor, MAX_LENGTH, EOS, clock=lambda step: 5.0, drafter=drafter)
    finally:
        executor.close()


def job(max_tokens: int = 40, prompt: tuple[int, ...] = PROMPT, regex: str | None = None, **sampling: Any) -> Job:
    asked = SamplingParams(max_tokens=max_tokens, logprobs=2, ignore_eos=True, **sampling)
    forced = None if regex is None else TokenConstraints(grammar=grammar("regex", regex, models_zoo.VOCAB_SIZE, EOS))
    return Job(prompt, asked, seed=11, constraints=forced)


def check(driver: Driver, jobs: list[Job]) -> tuple[int, int]:
    """Run jobs together: all get what each gets alone without draft tokens. How many draft tokens there were, and how
    many of them were right.
    """
    keys = [driver.add(wanted) for wanted in jobs]
    driver.run()
    for wanted, choices in zip(jobs, keys, strict=True):
        for index, key in enumerate(choices):
            assert driver.sampled[key] == alone(roomy(), MAX_LENGTH, wanted, index, EOS)[0]
    assert driver.scheduler.drafts is not None
    stats = driver.scheduler.drafts.stats
    return stats.draft_tokens_total, stats.accepted_total


# Two processes start.
def test_all_drafts_of_the_model_itself_are_accepted() -> None:
    """With forks that share blocks, prompts that begin alike, and all ways to sample."""
    jobs = [
        job(temperature=0.0),
        job(n=3, temperature=1.0),
        job(prompt=(*PROMPT[:32], 5), temperature=1.5, top_p=0.9, top_k=20, repetition_penalty=1.2),
        job(9, PROMPT[:3], presence_penalty=1.0, logit_bias={7: 5.0}),
    ]
    with drafting() as driver:
        draft_tokens, num_accepted = check(driver, jobs)
        assert draft_tokens == num_accepted >= 60
        assert len(driver.steps) <= 25


@pytest.mark.sweep
def test_rejected_draft_tokens_change_nothing() -> None:
    with drafting("llama-tied") as driver:
        draft_tokens, num_accepted = check(driver, [job(n=2, temperature=1.0), job(30, (1, 2), temperature=0.4)])
        assert num_accepted < draft_tokens


@pytest.mark.sweep
def test_the_first_draft_is_one_that_a_grammar_allows() -> None:
    with drafting() as driver:
        check(driver, [job(40, regex="[a-f]{40,60}", temperature=1.0), job(20)])
        constrained = [draft for step in driver.steps for draft in step.rows.drafts if draft.sequence.key == 0]
        assert len(constrained) > 10
        assert driver.scheduler.drafts is not None
        assert driver.scheduler.drafts.stats.accepted_at[0] == driver.scheduler.drafts.stats.drafts_total


@contextmanager
def predicting(folder: Path, stages: int) -> Iterator[Driver]:
    """An engine with the checkpoint's layer for drafts, in as many stages, whose draft tokens seem to take no time."""
    given = EngineOptions(
        str(folder),
        device="cpu",
        speculative=SpeculativeOptions(speculative_config={"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}),
        pipeline=PipelineOptions(pipeline_parallel_size=stages),
    )
    model = open_model(given)
    wanted = model.executor_options(given, **LIMITS)
    executor: Executor
    if stages > 1:
        executor = load_stages(given, model, wanted)
    else:
        executor = model.device.load(model.spec, model.weights, wanted)
    layer = StagedLayer(executor) if isinstance(executor, PipelineExecutor) else cast(DraftExecutor, executor)
    try:
        drafter = MtpDrafter(layer, DRAFT_TOKENS, max_context=1000, clock=lambda: 0.0)
        yield Driver(executor, MAX_LENGTH, EOS, clock=lambda step: 5.0, seconds=lambda: 0.0, drafter=drafter)
    finally:
        executor.close()


# Two processes start.
@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("deepseek-v3", "glm4-moe"))]
)
def test_a_layer_behind_the_last_stage_drafts_what_it_drafts_in_one_process(name: str) -> None:
    """For a batch with forks, prompts that begin alike, and a grammar."""
    wanted = [
        job(temperature=0.0),
        job(n=3, temperature=1.0),
        job(prompt=(*PROMPT[:32], 5), temperature=0.0, repetition_penalty=1.2),
        job(20, regex=r"(high|low) tide[\s\S]*"),
    ]
    folder = mtp_zoo.agreeing_folder(name) if name in mtp_zoo.QWENS else mtp_zoo.folder(name)
    sampled, draft_tokens = [], []
    for stages in (1, 2):
        with predicting(folder, stages) as driver:
            for one in wanted:
                driver.add(one)
            driver.run()
            sampled.append(driver.sampled)
            draft_tokens.append([draft.token_ids for step in driver.steps for draft in step.rows.drafts])
    assert sampled[0] == sampled[1]
    assert draft_tokens[0] == draft_tokens[1]
    assert len(draft_tokens[0]) > 20


@pytest.mark.sweep
def test_a_layer_behind_the_last_stage_changes_no_answer() -> None:
    folder = mtp_zoo.folder("qwen3_next")
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    config = {"method": "mtp", "num_speculative_tokens": 3}
    found = answers(folder, **options, pipeline_parallel_size=2, speculative_config=config)
    assert found == answers(folder, **options, threads_bind=one_core())


# Two pipelines start, and one of them again.
@pytest.mark.sweep
def test_a_last_stage_that_ends_while_it_drafts_is_named_and_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, killed = PipelineExecutor.ask, []

    def ask_a_stopped_one(self: PipelineExecutor, kind: int, *given: Any) -> Any:
        """The first time, the stage has the question and does not answer it any more."""
        if kind == DRAFT_HEAD and not killed:
            killed.append(children_of(os.getpid())[-1])
            os.kill(killed[0], signal.SIGSTOP)
            ending = threading.Timer(0.1, os.kill, (killed[0], signal.SIGKILL))
            ending.start()
        return ask(self, kind, *given)

    folder = mtp_zoo.agreeing_folder("qwen3_5")
    with predicting(folder, 2) as driver:
        driver.add(job())
        driver.run()
        expected = [*driver.sampled.values()]
    monkeypatch.setattr(PipelineExecutor, "ask", ask_a_stopped_one)
    with predicting(folder, 2) as driver:
        driver.add(job())
        with pytest.raises(DeviceError, match=r"pipeline stage 2 of 2 .* was killed by SIGKILL") as caught:
            driver.run()
        assert len(killed) == 1
        for key in driver.scheduler.unfinished:
            driver.abort(key)
        driver.scheduler.lose_cache("lost")
        cast(PipelineExecutor, driver.executor).restart(caught.value)
        driver.sampled.clear()
        driver.add(job())
        driver.run()
        assert [*driver.sampled.values()] == expected


# Two processes start, and start again.
@pytest.mark.sweep
def test_stages_that_start_again_have_a_draft_model_that_knows_nothing_of_before() -> None:
    with drafting() as driver:
        executor: Any = driver.executor
        check(driver, [job()])
        os.kill(children_of(os.getpid())[0], signal.SIGKILL)
        driver.add(job())
        with pytest.raises(DeviceError, match="pipeline stage 1 of 2"):
            driver.run()
        driver.scheduler.lose_cache("lost")
        executor.restart(DeviceError("lost"))
        for key in driver.scheduler.unfinished:
            driver.abort(key)
        before, _ = check(driver, [])
        draft_tokens, num_accepted = check(driver, [job(), job(prompt=(*PROMPT, 4))])
        assert draft_tokens == num_accepted > before


def speculative_config() -> dict[str, Any]:
    draft = models_zoo.folder("llama-tied", tokenizer=True)
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["llama-tied", "gemma2", "granitemoehybrid"])
def test_a_draft_model_changes_no_answer(model: str) -> None:
    folder = models_zoo.folder(model, tokenizer=True)
    found = answers(folder, pipeline_parallel_size=2, speculative_config=speculative_config())
    assert found == expected(model)


# Two processes start, and start again.
@pytest.mark.sweep
def test_a_stage_that_ends_while_it_drafts_is_named_and_starts_again() -> None:
    folder = str(models_zoo.folder("llama-tied", tokenizer=True))
    overrides = {"hf_overrides": {"max_position_embeddings": 8192}, "max_model_len": 4096}
    short = Params(max_tokens=8, temperature=0.0)
    with LLM(
        folder,
        device="cpu",
        pipeline_parallel_size=2,
        speculative_config=speculative_config(),
        **overrides,
    ) as llm:
        expected = llm.generate([[5, 6, 7]], short, use_tqdm=False)[0].outputs[0].token_ids
        killing = kill_soon(0)
        (output,) = llm.generate([[5, 6, 7]], Params(max_tokens=4000, ignore_eos=True), use_tqdm=False)
        killing.join()
        assert "pipeline stage 1 of 2 (layer 0) was killed by SIGKILL" in (output.outputs[0].error or "")
        assert llm.generate([[5, 6, 7]], short, use_tqdm=False)[0].outputs[0].token_ids == expected
    wait_until(lambda: not children_of(os.getpid()))
