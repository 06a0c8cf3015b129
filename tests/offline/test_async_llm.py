"""AsyncLLM: answers that are read as they grow."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import encoder_zoo as zoo
import pytest

from tidewheel import LLM, AsyncLLM, PoolingParams, RequestOutput, RequestOutputKind, SamplingParams, TidewheelError
from tidewheel.engine.errors import EngineDeadError, InvalidRequestError

PROMPT = "The wheel turns"
SAID = [{"role": "user", "content": "Who are you?"}]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(seed=3, max_tokens=20, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def run() -> Any:
    """Runs a test's coroutine with an AsyncLLM, all of them on one event loop."""
    loop = asyncio.new_event_loop()
    llm = AsyncLLM(max_num_seqs=8, max_model_len=512, embedding_model=str(zoo.folder("bert")))

    def run_with(test: Callable[[AsyncLLM], Coroutine[Any, Any, None]]) -> None:
        loop.run_until_complete(asyncio.wait_for(test(llm), 250))

    yield run_with
    loop.run_until_complete(llm.shutdown())
    loop.close()


async def outputs_of(llm: AsyncLLM, prompt: Any = PROMPT, *arguments: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, *arguments)]


def test_text_grows_and_is_that_of_llm(run: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        whole = await outputs_of(llm, PROMPT, params())
        texts = [output.outputs[0].text for output in whole]
        assert len(texts) > 1
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))
        assert [output.finished for output in whole] == [False] * (len(whole) - 1) + [True]
        pieces = await outputs_of(llm, PROMPT, params(output_kind=RequestOutputKind.DELTA))
        assert "".join(output.outputs[0].text for output in pieces) == texts[-1]
        [last] = await outputs_of(llm, PROMPT, params(output_kind=RequestOutputKind.FINAL_ONLY))
        assert last.outputs[0] == whole[-1].outputs[0]
        found.append(last)

    found: list[RequestOutput] = []
    run(test)
    with LLM(max_num_seqs=8, max_model_len=512) as llm:
        assert llm.generate(PROMPT, params(), use_tqdm=False)[0].outputs == found[0].outputs


def test_several_choices_and_log_probabilities(run: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        wanted = params(n=3, logprobs=1)
        grown: dict[int, Any] = {}
        async for output in llm.generate(PROMPT, wanted):
            [grown_one] = output.outputs
            grown[grown_one.index] = grown_one
        [last] = await outputs_of(llm, PROMPT, params(n=3, logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY))
        assert [grown[i] for i in range(3)] == last.outputs
        pieces = await outputs_of(llm, PROMPT, params(logprobs=1, output_kind=RequestOutputKind.DELTA))
        assert [token for piece in pieces for token in piece.outputs[0].token_ids] == grown[0].token_ids
        assert [entry for piece in pieces for entry in piece.outputs[0].logprobs or []] == grown[0].logprobs

    run(test)


def test_many_at_once(run: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        asked = (outputs_of(llm, f"{i} and", params()) for i in range(40))
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*asked))
        chats = [output async for output in llm.chat(SAID, params(), add_generation_prompt=True)]
        assert chats[-1].outputs[0].text
        vectors = await llm.embed(["the tide", "the corn"], pooling_params=PoolingParams(normalize=True))
        scores = await llm.score(["the tide"], ["the tide", "the corn"])
        assert len(vectors) == 2
        [array] = [output async for output in llm.encode("the tide", PoolingParams(normalize=True), "mine")]
        assert (array.request_id, array.outputs.data.tolist()) == ("mine", vectors[0].outputs.embedding)
        [bare] = await llm.embed(["the tide"], use_activation=False)
        [same] = await llm.embed(["the tide"], normalize=False)
        assert bare.outputs.embedding == same.outputs.embedding != vectors[0].outputs.embedding
        with pytest.raises(InvalidRequestError, match="use_activation contradicts normalize"):
            await llm.embed(["the tide"], use_activation=False, normalize=True)
        with pytest.raises(InvalidRequestError, match="the task embed, and this call is for classify"):
            await llm.classify(["the tide"], pooling_params=PoolingParams(task="embed"))
        await llm.check_health()
        assert (await llm.get_tokenizer()).decode([5]) == llm.get_tokenizer().decode([5])
        await llm.reset_prefix_cache()
        assert (await llm.get_model_config()).max_model_len == 512
        with pytest.raises(InvalidRequestError, match=r"AsyncLLM\.sleep is not supported: the model stays in memory"):
            await llm.sleep()  # type: ignore[attr-defined]
        assert scores[0].outputs.score == pytest.approx(1)

    run(test)


def test_an_aborted_request_ends(run: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        last = None
        async for output in llm.generate(PROMPT, LONG, "mine"):
            if last is None:
                with pytest.raises(InvalidRequestError, match="'mine' runs already"):
                    await outputs_of(llm, PROMPT, LONG, "mine")
                await llm.abort(["mine", "never there"])
            last = output
        assert last is not None
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        await llm.abort("mine")
        assert (await outputs_of(llm, PROMPT, params(), "mine"))[-1].outputs[0].finish_reason == "length"

    run(test)


def test_one_that_is_left_ends(run: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        reader = llm.generate(PROMPT, LONG, "left")
        await anext(reader)
        await reader.aclose()
        await outputs_of(llm, PROMPT, params(), "left")  # its id is free again
        task = asyncio.create_task(outputs_of(llm, PROMPT, LONG, "cancelled"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await outputs_of(llm, PROMPT, params(), "cancelled")

    run(test)


def test_what_cannot_be_served_is_refused(run: Any) -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await outputs_of(llm, "")
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role"):
            [_ async for _ in llm.chat([{"role": "wheel", "content": "x"}])]

    run(test)


def test_another_event_loop_and_the_end() -> None:
    llm = AsyncLLM(max_num_seqs=4)

    async def answer() -> None:
        assert (await outputs_of(llm, PROMPT, params()))[-1].finished

    async def end() -> None:
        running = asyncio.create_task(outputs_of(llm, PROMPT, SamplingParams(max_tokens=2000, ignore_eos=True)))
        await asyncio.sleep(0.1)
        async with llm:
            pass
        assert (await running)[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="stopped"):
            await outputs_of(llm)

    async def both() -> None:
        await answer()
        with pytest.raises(TidewheelError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, answer())
        await end()

    asyncio.run(both())
