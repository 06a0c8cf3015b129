"""Streams and their sinks: all that was said arrives in order, whenever it is taken, and then the end, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.tiny_tokenizers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.core.output_processor import OutputProcessor
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.outputs import FinishReason, RequestOutput, TokenLogprob
from tidewheel.engine.sampling_params import SamplingParams

TOKENIZER = tiny("byte-level")
TEXT = "The tide turns the wheel 🦩 and the wheel grinds the corn, schön und gut. " * 2
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False)


class Taker:
    """A sink that keeps what it is given. `then` is called with each output."""

    def __init__(self, then: Callable[[RequestOutput], None] = lambda output: None) -> None:
        self.outputs: list[RequestOutput] = []
        self.ends: list[Exception | None] = []
        self._then = then

    def push(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self._then(output)

    def end(self, failure: Exception | None) -> None:
        self.ends.append(failure)

    def text(self, index: int = 0) -> str:
        return "".join(output.text for output in self.outputs if output.index == index)

    def ids(self, index: int = 0) -> list[int]:
        return [token for output in self.outputs if output.index == index for token in output.token_ids]


def stream_of(sampling: SamplingParams, n: int = 1) -> RequestStream:
    choices = [OutputProcessor(index, index, sampling, TOKENIZER.detokenizer()) for index in range(n)]
    return RequestStream(choices, lambda choices: None)


def finish(stream: RequestStream, choice: OutputProcessor) -> None:
    choice.finish(FinishReason.STOP)
    stream.notify(choice)


def test_outputs_wait_for_a_reader_and_are_merged() -> None:
    stream, taker = stream_of(SamplingParams()), Taker()
    (choice,) = stream.choices
    for token in IDS[:5]:
        stream.push(choice, token, None)
    stream.read(taker)
    assert taker.outputs == []
    stream.resume()
    assert [output.token_ids for output in taker.outputs] == [IDS[:5]]
    stream.push(choice, IDS[5], None)
    stream.pause()
    for token in IDS[6:]:
        stream.push(choice, token, None)
    finish(stream, choice)
    assert [len(output.token_ids) for output in taker.outputs] == [5, 1]
    assert taker.ends == []
    stream.resume()
    assert [len(output.token_ids) for output in taker.outputs] == [5, 1, len(IDS) - 6]
    assert (taker.text(), taker.ends) == (TEXT, [None])
    stream.resume()
    assert taker.ends == [None]


def test_a_reader_who_comes_late_gets_all_and_the_end() -> None:
    stream, taker = stream_of(SamplingParams(), n=2), Taker()
    for choice in stream.choices:
        for token in IDS:
            stream.push(choice, token, None)
        finish(stream, choice)
    stream.read(taker)
    stream.resume()
    assert [taker.text(0), taker.text(1), taker.ends] == [TEXT, TEXT, [None]]


def test_what_a_sink_raises_is_its_own_end() -> None:
    def refuse(output: RequestOutput) -> None:
        if len(taker.outputs) == 3:
            raise ValueError("enough")

    stream, taker = stream_of(SamplingParams()), Taker(refuse)
    stream.read(taker)
    stream.resume()
    for token in IDS:
        assert not stream.push(stream.choices[0], token, None)
    finish(stream, stream.choices[0])
    stream.resume()
    assert taker.ids() == IDS[:3]
    (failure,) = taker.ends
    assert isinstance(failure, ValueError)
    assert stream.choices[0].num_tokens == len(IDS)


def test_logprobs_are_never_merged() -> None:
    stream, taker = stream_of(SamplingParams(logprobs=0)), Taker()
    for token in IDS:
        stream.push(stream.choices[0], token, TokenLogprob(-1.0))
    stream.read(taker)
    stream.resume()
    assert [list(output.token_ids) for output in taker.outputs] == [[token] for token in IDS]


def test_an_iterator_that_was_cancelled_misses_nothing() -> None:
    async def scenario() -> None:
        stream = stream_of(SamplingParams())
        outputs = aiter(stream)
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        waiting.cancel()
        for token in IDS:
            stream.push(stream.choices[0], token, None)
        finish(stream, stream.choices[0])
        assert "".join([output.text async for output in outputs]) == TEXT

    asyncio.run(scenario())


@settings(max_examples=70, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=150),
    st.sampled_from([(), ("corn",), ("wheel g", "🦩 a")]),
    st.sets(st.integers(0, 30)),
)
def test_what_is_said_does_not_depend_on_when_it_is_taken(
    moments: list[tuple[int, bool]], stop: tuple[str, ...], pauses: set[int]
) -> None:
    """Each moment gives a choice a token, and may resume the stream; the sink pauses after some of the outputs."""
    sampling = SamplingParams(n=3, stop=stop)
    taken, at_once = stream_of(sampling, 3), stream_of(sampling, 3)
    slow = Taker(lambda output: taken.pause() if len(slow.outputs) in pauses else None)
    fast = Taker()
    for stream, sink in ((taken, slow), (at_once, fast)):
        stream.read(sink)
        stream.resume()
    given = [0, 0, 0]
    for index, resumes in moments:
        ended = {
            stream.choices[index].finished or stream.push(stream.choices[index], IDS[given[index]], None)
            for stream in (taken, at_once)
        }
        assert len(ended) == 1
        given[index] += 1
        if resumes:
            taken.resume()
    for stream in (taken, at_once):
        stream.abort()
    for _ in range(1 + len(pauses)):
        taken.resume()
    for index in range(3):
        assert slow.text(index) == fast.text(index)
        assert slow.ids(index) == fast.ids(index)
        assert taken.choices[index].num_tokens == at_once.choices[index].num_tokens == len(slow.ids(index))
    assert slow.ends == fast.ends == [None]
