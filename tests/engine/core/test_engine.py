"""The engine as the server sees it: streams that always end, text that is right, trouble that stays where it arose."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from engine.books import check_scheduler
from engine.fake_executor import FakeExecutor
from engine.tiny_tokenizers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.constraints.grammar import GrammarCompiler
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.devices.batch import StepBatch, StepOutput
from tidewheel.engine.devices.bucket_stats import BucketStats
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.devices.sampling import NO_TOKEN
from tidewheel.engine.errors import EngineDeadError, InvalidRequestError
from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.speculation.drafter import Draftable
from tidewheel.engine.speculation.drafts import DraftStats

TOKENIZER = tiny("byte-level")
EOS = 1
ROOMY = ExecutorLimits(4, 64, 8, 64)


class Reciter(FakeExecutor):
    """Samples the tokens of `script` one after another, the same for every sequence, and then EOS for ever.

    `pause_s` is the length of a step; `broken_at` is the step that raises.
    """

    def __init__(
        self, script: list[int], limits: ExecutorLimits = ROOMY, pause_s: float = 0.0, broken_at: int = -1
    ) -> None:
        super().__init__(limits, TOKENIZER.vocab_size)
        self.script = script
        self.pause_s = pause_s
        self.broken_at = broken_at
        self.prompt_len = 3

    def step(self, batch: StepBatch) -> StepOutput:
        output = super().step(batch)
        if self.num_steps == self.broken_at:
            raise RuntimeError("the device caught fire")
        time.sleep(self.pause_s)
        places = batch.sampling.position - self.prompt_len
        script = [*self.script, EOS]
        output.token_ids = np.array([script[min(p, len(script) - 1)] for p in places], dtype=np.int32)
        return output


def make(executor: FakeExecutor, **options: Any) -> Engine:
    options = {"model_name": "fake", "max_model_len": 128, "eos_token_ids": frozenset({EOS})} | options
    options = {"max_step_ms": 75.0, "enable_prefix_caching": True} | options
    return Engine(executor, TOKENIZER, vocab_size=executor.vocab_size, **options)


def run(engine: Engine, scenario: Callable[[Engine], Awaitable[Any]]) -> Any:
    """Start the engine, play the scenario, stop the engine."""

    async def main() -> Any:
        engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 30)
        finally:
            await engine.stop()
            check_scheduler(engine._scheduler)
            assert engine.stats().kv_blocks_used == 0
            executor: FakeExecutor = engine._executor  # type: ignore[assignment]
            assert executor.closed == 1
            await asyncio.sleep(0)  # the last outputs
            assert executor.times_yielded == executor.times_reclaimed

    return asyncio.run(main())


def request(sampling: SamplingParams | None = None, prompt: tuple[int, ...] = (5, 6, 7), **options: Any) -> Request:
    return Request("r", prompt, sampling or SamplingParams(), **options)


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


def recite(text: str, sampling: SamplingParams, **options: Any) -> tuple[str, tuple[int, ...], RequestOutput]:
    """All text, all tokens, and the last output of a request whose answer is `text`."""
    script = TOKENIZER.encode(text, add_special_tokens=False)

    async def scenario(engine: Engine) -> list[RequestOutput]:
        return await collect(engine.submit(request(sampling)))

    outputs = run(make(Reciter(script), **options), scenario)
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    ids = tuple(token for output in outputs for token in output.token_ids)
    return "".join(output.text for output in outputs), ids, outputs[-1]


TEXT = "The tide turns the wheel 🦩 and the wheel grinds the corn."
IDS = tuple(TOKENIZER.encode(TEXT, add_special_tokens=False))


def test_end_of_sequence_ends_a_choice_and_is_not_shown() -> None:
    for skip in (True, False):
        text, ids, last = recite(TEXT, SamplingParams(skip_special_tokens=skip))
        assert (text, ids) == (TEXT, (*IDS, EOS))
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


def test_ignored_end_of_sequence_goes_on_to_the_length() -> None:
    text, ids, last = recite("ok", SamplingParams(max_tokens=20, ignore_eos=True))
    assert text == "ok"
    assert len(ids) == 20
    assert last.finish_reason is FinishReason.LENGTH


def test_stop_token_ids_are_counted_but_not_shown() -> None:
    stop = IDS[4]
    text, ids, last = recite(TEXT, SamplingParams(stop_token_ids=(stop,)))
    assert ids == IDS[:5]
    assert text == TOKENIZER.decode(IDS[:4])
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    text, _, _ = recite(TEXT, SamplingParams(stop_token_ids=(stop,), include_stop_str_in_output=True))
    assert text == TOKENIZER.decode(IDS[:5])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["wheel", "el 🦩 a", "T", "corn.", " "])
def test_stop_strings_across_tokens(stop: str, include: bool) -> None:
    sampling = SamplingParams(stop=("never", stop), include_stop_str_in_output=include)
    text, ids, last = recite(TEXT, sampling)
    assert text == TEXT[: TEXT.index(stop) + (len(stop) if include else 0)]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    assert stop in TOKENIZER.decode(ids)
    assert stop not in TOKENIZER.decode(ids[:-1]), "no token after the one that completed the stop string"


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    text, _, last = recite(TEXT, SamplingParams(stop=("wheel",), min_tokens=len(IDS) // 2))
    assert text == TEXT[: TEXT.rindex("wheel")]
    assert last.stop_reason == "wheel"


def test_what_might_have_become_a_stop_string_is_shown_at_the_end() -> None:
    text, _, last = recite("grinds the", SamplingParams(stop=("the corn",)))
    assert text == "grinds the"
    assert last.finish_reason is FinishReason.STOP


def test_length_ends_in_the_middle_of_a_character_with_a_replacement() -> None:
    cut = next(i for i in range(len(IDS)) if TOKENIZER.decode(IDS[:i]).endswith("\ufffd"))
    text, _, last = recite(TEXT, SamplingParams(max_tokens=cut))
    assert text == TOKENIZER.decode(IDS[:cut])
    assert last.finish_reason is FinishReason.LENGTH


def test_the_context_is_a_limit() -> None:
    _, ids, last = recite(TEXT, SamplingParams(ignore_eos=True), max_model_len=13)
    assert len(ids) == 10
    assert last.finish_reason is FinishReason.LENGTH


def test_logprobs_come_with_their_tokens() -> None:
    async def scenario(engine: Engine) -> list[RequestOutput]:
        quiet = engine.submit(request(SamplingParams(max_tokens=5)))
        outputs = await collect(engine.submit(request(SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True))))
        assert all(output.logprobs is None for output in await collect(quiet))
        return outputs

    outputs = run(make(FakeExecutor(ROOMY)), scenario)
    for output in outputs:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
            assert logprob.logprob == pytest.approx(-(token + 1) / 7)
            assert [i for i, _ in logprob.top] == [token, token + 1]


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests() -> None:
    async def scenario(engine: Engine) -> dict[int, dict[int, list[int]]]:
        results: dict[int, dict[int, list[int]]] = {}
        for n in (1, 3):
            outputs = await collect(engine.submit(request(SamplingParams(seed=-3, n=n, max_tokens=8, ignore_eos=True))))
            assert sum(output.finish_reason is not None for output in outputs) == n
            results[n] = {i: [t for o in outputs if o.index == i for t in o.token_ids] for i in range(n)}
        return results

    results = run(make(FakeExecutor(ROOMY)), scenario)
    assert results[1][0] == results[3][0]
    assert len({tuple(tokens) for tokens in results[3].values()}) == 3


def test_beams_arrive_whole_the_best_first() -> None:
    sampling = SamplingParams(beam_width=4, n=2, max_tokens=5, logprobs=1, ignore_eos=True)

    async def scenario(engine: Engine) -> list[RequestOutput]:
        engine.submit(request(sampling)).abort()
        left = engine.submit(request(SamplingParams(beam_width=3, n=3, max_tokens=60)))
        await asyncio.sleep(0.01)
        left.abort()
        return await collect(engine.submit(request(sampling)))

    outputs = run(make(FakeExecutor(ROOMY)), scenario)
    assert [output.index for output in outputs] == [0, 1]
    for output in outputs:
        assert len(output.token_ids) == len(output.logprobs or ()) == 5
        assert output.text == TOKENIZER.decode(output.token_ids)
        assert output.finish_reason is FinishReason.LENGTH


def test_searches_that_never_fit_are_refused() -> None:
    async def scenario(engine: Engine) -> None:
        for options, param in (({"beam_width": 9}, "n"), ({"beam_width": 4, "max_tokens": 80}, "max_tokens")):
            with pytest.raises(InvalidRequestError) as caught:
                engine.submit(request(SamplingParams(**options)))
            assert caught.value.param == param
        with pytest.raises(InvalidRequestError, match="constraints must be left out with beam search"):
            Request("c", (1,), SamplingParams(beam_width=2), constraints=TokenConstraints(allowed_token_ids=(1,)))
        longest = SamplingParams(beam_width=4, max_tokens=60, ignore_eos=True)
        assert len((await collect(engine.submit(request(longest))))[-1].token_ids) == 60

    run(make(FakeExecutor(ROOMY)), scenario)


def test_without_a_seed_every_request_draws_one() -> None:
    async def scenario(engine: Engine) -> set[tuple[int, ...]]:
        streams = [engine.submit(request(SamplingParams(max_tokens=8, ignore_eos=True))) for _ in range(4)]
        return {tuple(t for o in await collect(stream) for t in o.token_ids) for stream in streams}

    assert len(run(make(FakeExecutor(ROOMY)), scenario)) == 4


def test_cached_prompt_tokens_are_reported_and_counted() -> None:
    async def scenario(engine: Engine) -> list[int]:
        prompt = tuple(range(10, 31))
        return [
            (await collect(engine.submit(request(SamplingParams(max_tokens=2), prompt))))[-1].num_cached_tokens
            for _ in range(2)
        ]

    engine = make(FakeExecutor(ROOMY))
    assert run(engine, scenario) == [0, 20]
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.cached_prompt_tokens_total) == (42, 20)
    assert stats.generation_tokens_total in (3, 4)
    assert stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0
    assert stats.kv_blocks_total == 64
    assert stats.steps_total > 0


def test_choices_that_share_a_prompt_have_not_found_it_in_the_cache() -> None:
    async def scenario(engine: Engine) -> list[int]:
        outputs = await collect(engine.submit(request(SamplingParams(max_tokens=2, n=3), tuple(range(10, 31)))))
        return [output.num_cached_tokens for output in outputs if output.finish_reason]

    assert run(make(FakeExecutor(ROOMY)), scenario) == [0, 0, 0]


def test_a_cache_that_was_reset_gives_nothing_until_it_is_filled_again() -> None:
    prompt = tuple(range(5, 18))

    async def scenario(engine: Engine) -> list[int]:
        cached = []
        for reset in (False, False, True, False):
            if reset:
                engine.reset_prefix_cache()
            outputs = await collect(engine.submit(request(prompt=prompt)))
            cached.append(outputs[-1].num_cached_tokens)
        return cached

    assert run(make(Reciter([2])), scenario) == [0, 12, 0, 12]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(n=3), SamplingParams(n=2, beam_width=3, max_tokens=4)], ids=["sampled", "beams"]
)
def test_choices_of_one_prompt_are_timed_alike(sampling: SamplingParams) -> None:
    async def scenario(engine: Engine) -> None:
        stream = engine.submit(request(sampling))
        await collect(stream)
        times = [choice.times for choice in stream.choices]
        assert len(times) == sampling.n
        assert all(t is not None and 0 < t.queued <= t.scheduled <= t.first_token for t in times)
        assert len({(t.scheduled, t.first_token) for t in times if t is not None}) == 1

    run(make(FakeExecutor(ROOMY)), scenario)


def test_buckets_are_counted_while_the_engine_runs_on_a_device_that_has_them() -> None:
    class Padding(Reciter):
        def stats(self) -> BucketStats:
            assert not self.closed
            return BucketStats((), self.num_steps, 0)

    async def generate(engine: Engine) -> BucketStats | None:
        await collect(engine.submit(request()))
        return engine.bucket_stats()

    assert run(make(Reciter([5])), generate) is None
    engine = make(Padding([5]))
    assert engine.bucket_stats() is None
    stats = run(engine, generate)
    assert stats is not None
    assert stats.num_outside == 2
    assert engine.bucket_stats() is None


def test_waiting_and_prefill_are_timed() -> None:
    async def scenario(engine: Engine) -> None:
        streams = [engine.submit(request(SamplingParams(max_tokens=2, ignore_eos=True))) for _ in range(12)]
        await asyncio.gather(*map(collect, streams))
        times = [choice.times for stream in streams for choice in stream.choices]
        waited = [t.scheduled - t.queued for t in times if t is not None]
        assert len(waited) == 12
        assert min(waited) >= 0
        assert max(waited) > 0.02  # the last ones, until the first have had both their steps
        assert all(t is not None and t.first_token - t.scheduled >= 0.02 for t in times)
        stats = engine.stats()
        assert stats.step_seconds.buckets()[-1][1] == stats.step_tokens.buckets()[-1][1] == stats.steps_total
        assert stats.step_tokens.sum == 12 * (3 + 1)
        assert stats.step_seconds.sum >= stats.steps_total * 0.02

    run(make(Reciter([2], pause_s=0.02)), scenario)


@pytest.mark.parametrize(
    ("bad", "param", "message"),
    [
        (request(prompt=()), "prompt", "at least one token"),
        (request(prompt=(1,) * 128), "prompt", "128 tokens.*context of 128 tokens leaves room for at most 127"),
        (request(prompt=(1, 403)), "prompt", "token id 403.*vocabulary of 403"),
        (request(prompt=(1, -1)), "prompt", "token id -1"),
        (request(prompt=(2**70,)), "prompt", "not in the vocabulary"),
        (request(SamplingParams(logit_bias={9999: 1.0})), "logit_bias", "token id 9999"),
        (request(SamplingParams(stop_token_ids=(3, -4))), "stop_token_ids", "token id -4"),
    ],
)
def test_requests_that_can_never_be_served(bad: Request, param: str, message: str) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            engine.submit(bad)
        assert caught.value.param == param
        assert len(await collect(engine.submit(request(SamplingParams(max_tokens=1))))) == 1

    assert TOKENIZER.vocab_size == 403
    run(make(Reciter([2] * 9)), scenario)


def test_a_prompt_larger_than_the_whole_cache_is_refused() -> None:
    async def scenario(engine: Engine) -> RequestOutput:
        assert engine.max_model_len == 16
        with pytest.raises(InvalidRequestError, match="context of 16 tokens"):
            engine.submit(request(prompt=(3,) * 16))
        return (await collect(engine.submit(request(SamplingParams(ignore_eos=True), (3,) * 15))))[-1]

    last = run(make(FakeExecutor(ExecutorLimits(4, 4, 8, 64))), scenario)
    assert last.finish_reason is FinishReason.LENGTH


def test_an_aborted_stream_leaves_the_others_alone() -> None:
    async def scenario(engine: Engine) -> None:
        streams = [engine.submit(request(SamplingParams(ignore_eos=True, n=2))) for _ in range(3)]
        outputs = [await anext(aiter(stream)) for stream in streams]
        assert all(output.token_ids for output in outputs)
        streams[1].abort()
        for stream in (streams[0], streams[2]):
            rest = await collect(stream)
            assert {output.finish_reason for output in rest if output.finish_reason} == {FinishReason.LENGTH}

    run(make(Reciter([2], pause_s=0.001)), scenario)


def test_an_aborted_stream_says_so_for_every_choice() -> None:
    async def scenario(engine: Engine) -> None:
        stream = engine.submit(request(SamplingParams(ignore_eos=True, n=3)))
        await anext(aiter(stream))
        stream.abort()
        stream.abort()
        rest = await collect(stream)
        assert [output.finish_reason for output in rest].count(FinishReason.ABORT) == 3
        for _ in range(60_000):
            if not engine.stats().kv_blocks_used:
                break
            await asyncio.sleep(0.001)
        assert engine.stats().kv_blocks_used == 0

    run(make(Reciter([2], pause_s=0.001)), scenario)


def test_a_slow_reader_gets_everything_in_few_pieces() -> None:
    async def scenario(engine: Engine) -> tuple[list[RequestOutput], list[RequestOutput]]:
        slow, fast = (engine.submit(request()) for _ in range(2))
        rest = await collect(fast)
        return await collect(slow), rest

    slow, fast = run(make(Reciter(list(IDS), pause_s=0.002)), scenario)
    assert "".join(o.text for o in slow) == "".join(o.text for o in fast) == TEXT
    assert len(slow) == 1 < len(fast)


def test_a_slow_reader_gets_tokens_with_logprobs_one_by_one() -> None:
    async def scenario(engine: Engine) -> tuple[list[RequestOutput], list[RequestOutput]]:
        read, unread = (engine.submit(request(SamplingParams(logprobs=0))) for _ in range(2))
        return await collect(read), await collect(unread)

    read, unread = run(make(Reciter(list(IDS))), scenario)
    assert [(output.token_ids, output.text) for output in unread] == [(o.token_ids, o.text) for o in read]
    assert [len(output.token_ids) for output in unread] == [1] * (len(IDS) + 1)


def test_a_core_is_lent_while_many_tokens_are_passed_on() -> None:
    async def scenario(engine: Engine) -> tuple[int, int]:
        executor: FakeExecutor = engine._executor  # type: ignore[assignment]
        await collect(engine.submit(request()))
        lent_for_one = executor.times_yielded
        await asyncio.gather(*(collect(engine.submit(request())) for _ in range(8)))
        return lent_for_one, executor.times_yielded

    lent_for_one, lent_for_eight = run(make(Reciter(list(IDS))), scenario)
    assert lent_for_one == 0 < lent_for_eight


class Prompter:
    """Proposes the next five tokens of what a Reciter says, every third of its tokens wrong."""

    def propose(self, sequence: Draftable) -> list[int]:
        script = [1 - token if token < 2 else token - (i % 3 == 2) for i, token in enumerate((*IDS, EOS, EOS))]
        start = sequence.num_tokens - sequence.prompt_len
        return script[start : start + 5]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(n=3, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=11),
        SamplingParams(stop=("wheel",)),
        SamplingParams(stop=("el 🦩 a",), include_stop_str_in_output=True, logprobs=0),
        SamplingParams(stop_token_ids=(IDS[7],)),
        SamplingParams(ignore_eos=True, max_tokens=len(IDS) + 4, min_tokens=len(IDS)),
        SamplingParams(presence_penalty=1.0),
    ],
    ids=["plain", "choices", "length", "stop string", "shown stop string", "stop token", "min tokens", "penalty"],
)
def test_drafts_show_in_nothing_that_is_answered(sampling: SamplingParams) -> None:
    async def scenario(engine: Engine) -> tuple[list[object], DraftStats | None]:
        streams = [engine.submit(request(replace(sampling, seed=1))) for _ in range(3)]
        answers = await asyncio.gather(*(collect(stream) for stream in streams))
        return [whole(outputs, i) for outputs in answers for i in range(sampling.n)], engine.stats().drafts

    def whole(outputs: list[RequestOutput], index: int) -> object:
        mine = [output for output in outputs if output.index == index]
        return (
            "".join(output.text for output in mine),
            [token for output in mine for token in output.token_ids],
            [logprob for output in mine for logprob in output.logprobs or ()],
            [len(o.prompt_logprobs.logprobs) for o in mine if o.prompt_logprobs is not None],
            (mine[-1].finish_reason, mine[-1].stop_reason, mine[-1].error),
        )

    plain, _ = run(make(Reciter(list(IDS))), scenario)
    drafted, drafts = run(make(Reciter(list(IDS)), drafter=Prompter()), scenario)
    assert drafted == plain
    assert drafts is not None
    assert drafts.drafts_total > 0  # how many follow depends on how long steps and drafts take


def test_drain_refuses_the_new_and_finishes_the_old() -> None:
    async def scenario(engine: Engine) -> list[RequestOutput]:
        stream = engine.submit(request())
        draining = asyncio.ensure_future(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            engine.submit(request())
        await draining
        return await collect(stream)

    outputs = run(make(Reciter(list(IDS), pause_s=0.001)), scenario)
    assert "".join(output.text for output in outputs) == TEXT


def test_drain_aborts_what_takes_too_long() -> None:
    async def scenario(engine: Engine) -> list[RequestOutput]:
        stream = engine.submit(request(SamplingParams(ignore_eos=True)))
        await engine.drain(0.05)
        return await collect(stream)

    assert run(make(Reciter([2], pause_s=0.02)), scenario)[-1].finish_reason is FinishReason.ABORT


def test_where_nothing_runs_nothing_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: Engine) -> list[RequestOutput]:
        outputs = await collect(engine.submit(request()))
        await engine.drain(0)
        return outputs

    assert run(make(Reciter(list(IDS))), scenario)[-1].finish_reason is FinishReason.STOP
    assert not caplog.records


def test_stop_ends_every_stream_and_may_be_called_twice() -> None:
    async def scenario(engine: Engine) -> list[RequestOutput]:
        stream = engine.submit(request(SamplingParams(ignore_eos=True)))
        reader = asyncio.ensure_future(collect(stream))
        await asyncio.sleep(0.05)
        await engine.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            engine.submit(request())
        return await reader

    assert run(make(Reciter([2], pause_s=0.01)), scenario)[-1].finish_reason is FinishReason.ABORT


def test_warming_up_waits_until_nobody_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()
    monkeypatch.setattr(GrammarCompiler, "warm_up", lambda self: begun.append("warm"))

    async def scenario(engine: Engine) -> None:
        stream = engine.submit(request())
        await anext(aiter(stream))
        engine.warm_up()
        assert begun == []
        stream.abort()
        engine.warm_up()
        assert begun == ["warm"]
        await engine.stop()
        engine.warm_up()
        assert begun == ["warm"]

    run(make(Reciter([2], pause_s=0.01)), scenario)


def test_an_engine_that_was_never_started_refuses_and_stops() -> None:
    async def main() -> None:
        executor = FakeExecutor(ROOMY)
        engine = make(executor)
        with pytest.raises(EngineDeadError, match="not been started"):
            engine.submit(request())
        await engine.stop()
        await engine.stop()
        assert executor.closed

    asyncio.run(main())


def test_a_failing_device_ends_every_stream_with_an_error() -> None:
    async def scenario(engine: Engine) -> None:
        streams = [engine.submit(request(SamplingParams(ignore_eos=True))) for _ in range(12)]
        for outputs in await asyncio.gather(*map(collect, streams)):
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert "caught fire" in (outputs[-1].error or "")
        assert isinstance(engine.failure, RuntimeError)
        with pytest.raises(EngineDeadError, match="caught fire"):
            engine.submit(request())
        await engine.drain(1)

    engine = make(Reciter([2], broken_at=5))

    async def main() -> None:
        engine.start()
        await asyncio.wait_for(scenario(engine), 30)
        await engine.stop()

    asyncio.run(main())
    assert engine._executor.closed == 1  # type: ignore[attr-defined]


def test_deliveries_that_cannot_be_passed_on_end_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, choice: object) -> None:
        monkeypatch.undo()
        raise LookupError("a bug in a stream")

    async def scenario(engine: Engine) -> None:
        streams = [engine.submit(request(SamplingParams(ignore_eos=True))) for _ in range(3)]
        monkeypatch.setattr(RequestStream, "notify", broken)
        for outputs in await asyncio.gather(*map(collect, streams)):
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert "a bug in a stream" in (outputs[-1].error or "")
        assert isinstance(engine.failure, LookupError)
        with pytest.raises(EngineDeadError, match="a bug in a stream"):
            engine.reset_prefix_cache()

    run(make(Reciter([2], pause_s=0.001)), scenario)


def test_trouble_with_one_requests_text_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        known: ClassVar[dict[int, str]] = {}
        is_whole = True

        def push(self, token: int) -> str:
            raise ValueError("no such character")

        def flush(self) -> str:
            raise ValueError("no such character")

    good = TOKENIZER.detokenizer

    def detokenizer(prompt: Any, *options: Any) -> Any:
        return Broken() if prompt == (9,) * 3 else good(prompt, *options)

    monkeypatch.setattr(TOKENIZER, "detokenizer", detokenizer)

    async def scenario(engine: Engine) -> None:
        fine, broken = engine.submit(request()), engine.submit(request(prompt=(9,) * 3))
        outputs = await collect(broken)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "no such character" in (outputs[-1].error or "")
        assert "".join(output.text for output in await collect(fine)) == TEXT

    run(make(Reciter(list(IDS), pause_s=0.001)), scenario)


def test_logits_that_are_not_numbers_are_that_requests_error() -> None:
    async def scenario(engine: Engine) -> RequestOutput:
        return (await collect(engine.submit(request())))[-1]

    last = run(make(Reciter([2, 2, NO_TOKEN])), scenario)
    assert last.finish_reason is FinishReason.ERROR
    assert "not finite" in (last.error or "")
    assert NO_TOKEN not in last.token_ids


def test_an_idle_engine_does_nothing_and_wakes_at_once() -> None:
    async def scenario(engine: Engine) -> None:
        waited = []
        for _ in range(3):
            before = time.process_time()
            await asyncio.sleep(0.2)
            assert time.process_time() - before < 0.1
            started = time.perf_counter()
            await collect(engine.submit(request(SamplingParams(max_tokens=1))))
            waited.append(time.perf_counter() - started)
        assert min(waited) < 0.1, "the machine may be busy, but not each time"

    run(make(Reciter([2])), scenario)


actions = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt length
        st.integers(1, 3),  # n
        st.sampled_from([None, 1, 5]),  # max_tokens
        st.sampled_from(["read", "abort at once", "abort after one", "abort later"]),
        st.sampled_from([(), ("e",), ("tid", "x")]),
    ),
    min_size=1,
    max_size=8,
)


# Engines start and stop, and devices pause.
@settings(max_examples=35, deadline=None)
@given(actions, st.sampled_from([0.0, 0.0005]), st.sampled_from(["drain", "drain quickly", "stop"]))
def test_every_stream_ends_whatever_its_readers_do(plan: list[Any], pause_s: float, end: str) -> None:
    async def read(engine: Engine, prompt_len: int, n: int, max_tokens: int | None, manner: str, stop: Any) -> None:
        sampling = SamplingParams(n=n, max_tokens=max_tokens, stop=stop, ignore_eos=True)
        stream = engine.submit(request(sampling, tuple(range(2, 2 + prompt_len))))
        outputs = []
        if manner == "abort at once":
            stream.abort()
        elif manner == "abort after one":
            outputs.append(await anext(aiter(stream)))
            stream.abort()
        elif manner == "abort later":
            asyncio.get_running_loop().call_later(0.005, stream.abort)
        outputs += await collect(stream)
        ended = [output.index for output in outputs if output.finish_reason]
        assert sorted(ended) == list(range(n))

    async def scenario(engine: Engine) -> None:
        readers = [asyncio.ensure_future(read(engine, *action)) for action in plan]
        await asyncio.sleep(0)
        if end == "stop":
            await engine.stop()
        else:
            await engine.drain(10 if end == "drain" else 0.002)
        await asyncio.gather(*readers)

    limits = ExecutorLimits(4, 24, 4, 16)
    run(make(Reciter(list(IDS), limits, pause_s), max_model_len=64), scenario)
