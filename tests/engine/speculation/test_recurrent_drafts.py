"""Draft tokens at what models with recurrent layers say: right or wrong, they leave nothing in a state."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import models_zoo
import pytest
from engine.constraints.grammars import grammar
from engine.driving import Driver, Job, Oracle, alone
from harness import device_ids, make_device
from optional_packages import require_packages

from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import Mamba2Spec, ResidualBlockSpec
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.draft_model import ModelDrafter
from tidewheel.engine.weights import open_weights, read_config

require_packages("transformers")
pytest.importorskip("llguidance")  # not there on every machine

# Delta nets, Mamba2 and short convolutions, beside attention or alone.
MODELS = ["qwen3_5", "qwen3_next", "mamba2", "falcon-h1", "nemotron-h", "granitemoehybrid", "lfm2"]
MAX_LENGTH = 160  # tokens, prompt and output together
VOCAB_SIZE = 320
EOS = frozenset({1})  # of the byte-level tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"postal_code": {"enum": ["12345", "54321"]}, "street": {"type": "boolean"}},
    "required": ["postal_code", "street"],
    "additionalProperties": False,
}


OPTIONS = ExecutorOptions(
    dtype="float32",
    kv_cache_bytes=None,
    max_model_len=256,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    num_blocks=64,
)


@functools.cache
def executor(model: str) -> Executor:
    folder = models_zoo.folder(model)
    description = describe(read_config(folder), None)
    device = make_device(next(name for name in device_ids() if name != "torch"))
    return device.load(description.spec, open_weights(folder, description), OPTIONS)


def job(prompt: tuple[int, ...], seed: int, *, max_tokens: int = 50, **sampling: Any) -> Job:
    return Job(prompt, SamplingParams(max_tokens=max_tokens, logprobs=2, ignore_eos=True, **sampling), seed)


def jobs() -> list[Job]:
    """Greedy, sampled, with penalties, with forks, and with a grammar that forces most of its tokens."""
    greedy = job((5, 6, 7, 8, 9), 1)
    return [
        greedy,
        job((5, 6, 7, 8), 2, temperature=1.0, n=2),
        job(tuple(range(10, 50)), 3, temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5),
        dataclasses.replace(
            greedy,
            sampling=SamplingParams(max_tokens=80, temperature=1.0, logprobs=2),
            constraints=TokenConstraints(grammar=grammar("json_schema", json.dumps(SCHEMA), VOCAB_SIZE, EOS)),
        ),
    ]


class Asked:
    """A driver where each job samples the same as alone without drafts, though others draft beside it."""

    def __init__(self, model: str, seed: int, num_blocks: int) -> None:
        self._executor, self._oracle = executor(model), Oracle(seed)
        limits = dataclasses.replace(self._executor.limits, num_blocks=num_blocks, num_states=12)
        self.driver = Driver(self._executor, MAX_LENGTH, EOS, limits=limits, drafter=self._oracle)

    def run(self, wanted: list[Job]) -> list[list[int]]:
        """The tokens of each job's first choice."""
        expected = {
            (number, index): alone(self._executor, MAX_LENGTH, job, index, EOS)[0]
            for number, job in enumerate(wanted)
            for index in range(job.sampling.n)
        }
        keys = [self.driver.add(job) for job in wanted]
        for (number, index), sampled in expected.items():
            self._oracle.tell(keys[number][index], [token for token, *_ in sampled])
        self.driver.run()
        for (number, index), sampled in expected.items():
            assert self.driver.sampled[keys[number][index]] == sampled
        return [self.driver.tokens(first) for first, *_ in keys]


@pytest.mark.parametrize("model", MODELS)
def test_draft_tokens_accepted_and_rejected_change_no_bit(model: str) -> None:
    asked = Asked(model, seed=7, num_blocks=12)
    asked.run(jobs())
    scheduler = asked.driver.scheduler
    assert scheduler.drafts is not None
    stats = scheduler.drafts.stats
    assert 0 < stats.accepted_total < stats.draft_tokens_total
    assert scheduler.preemptions_total > 0
    drafts = [draft for step in asked.driver.steps for draft in step.rows.drafts]
    assert {draft.sequence.key for draft in drafts} == set(range(5))
    assert max(len(draft.token_ids) for draft in drafts) == 1 + executor(model).limits.max_draft_tokens


@pytest.mark.parametrize("model", MODELS)
def test_what_follows_an_answer_goes_on_from_a_state_without_rejected_draft_tokens(model: str) -> None:
    asked = Asked(model, seed=3, num_blocks=64)
    first = job((5, 6, 7, 8, 9), 1, max_tokens=100)
    (answer,) = asked.run([first])
    before = asked.driver.scheduler.cached_prompt_tokens_total
    asked.run([job((*first.prompt, *answer[:90], 20), 4, max_tokens=12)])
    assert asked.driver.scheduler.cached_prompt_tokens_total - before >= 64  # from a state that was known in a decode


def test_a_draft_model_drafts_for_a_model_with_recurrent_layers() -> None:
    large = executor("qwen3_5")
    device = make_device(next(name for name in device_ids() if name != "torch"))
    folder = models_zoo.folder("llama")
    description = describe(read_config(folder), None)
    small = device.load_draft(description.spec, open_weights(folder, description), OPTIONS, large)
    drafter = ModelDrafter(
        small,
        large.limits.max_draft_tokens,
        vocab_size=VOCAB_SIZE,
        own_vocab_size=VOCAB_SIZE,
        max_context=1000,
        clock=lambda: 0.0,
    )
    driver = Driver(large, MAX_LENGTH, EOS, clock=lambda step: 5.0, drafter=drafter)
    likely = {7: 6.0, 8: 6.0}  # so that two models of random weights agree now and then
    wanted = [job(tuple(range(first, 30)), first, temperature=1.0, logit_bias=likely) for first in (5, 20)]
    expected = [alone(large, MAX_LENGTH, one, 0, EOS)[0] for one in wanted]
    keys = [driver.add(one)[0] for one in wanted]
    driver.run()
    assert [driver.sampled[key] for key in keys] == expected
    assert driver.scheduler.drafts is not None
    assert 0 < driver.scheduler.drafts.stats.accepted_total < driver.scheduler.drafts.stats.draft_tokens_total


def test_a_model_whose_states_are_large_has_more_draft_tokens() -> None:
    device = make_device(next(name for name in device_ids() if name != "torch"))
    attention = describe(read_config(models_zoo.folder("llama")), None).spec
    assert (device.max_draft_tokens(attention), device.slot_bytes(attention)) == (0, 0)
    small = describe(read_config(models_zoo.folder("mamba2")), None).spec
    (mixer, *_) = small.recurrences()
    assert isinstance(mixer, Mamba2Spec)
    layer = ResidualBlockSpec(dataclasses.replace(mixer, state_dim=2000))
    large = dataclasses.replace(small, layers=((layer,),))
    assert device.max_draft_tokens(small) < device.max_draft_tokens(large)
    for spec in (small, large):
        draft_tokens = device.max_draft_tokens(spec)
        assert device.slot_bytes(spec) == spec.state_bytes + draft_tokens * spec.state_input_bytes
    assert device.slot_bytes(large) <= large.state_bytes * 7 / 6
