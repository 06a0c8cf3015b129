"""ChatRun: a conversation being answered, read as pieces of each choice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from starlette.types import Receive

from tidewheel.engine.outputs import RequestOutput

from ..errors import ApiError
from ..generation.frames import named_event, named_events
from ..generation.generations import Generation
from ..generation.streaming import EventStream, collect, feed
from ..protocol.usage import CompletionTokensDetails, Usage
from .answer import Answer
from .pieces import Piece, Turn


class ChoiceDelta(msgspec.Struct, gc=False):
    """What an output of the engine adds to one choice.

    `pieces` may be empty while text is held back, because it may be the beginning of a tag. `output` is what the engine
    gave: token ids, log-probabilities, stop reason. `finish_reason` (`stop`, `length` or `tool_calls`) comes with a
    choice's last delta.
    """

    index: int
    pieces: list[Piece]
    output: RequestOutput
    finish_reason: str | None


class ChoiceAnswer(msgspec.Struct):
    """One complete choice: its turn, why it ended, and the engine's outputs that it was made from."""

    index: int
    turn: Turn
    finish_reason: str
    stop_reason: str | int | None
    outputs: list[RequestOutput]


class ChatRun:
    """One conversation being answered. It is read once: by `whole`, by `feed`, or by a reader of its `generation` that
    shows each output to `delta`, or to the choice's own of the `answers`.

    `id` is the answer's, `model` the name it was asked for under, `created` the time in seconds since 1970,
    `prompt_token_ids` are the rendered prompt. `max_tokens` is the most that a choice may have; None is all that fit.
    """

    __slots__ = (
        "_counts_reasoning",
        "answers",
        "created",
        "generation",
        "id",
        "max_tokens",
        "model",
        "prompt_token_ids",
    )

    def __init__(
        self,
        generation: Generation,
        model: str,
        prompt_token_ids: list[int],
        answers: list[Answer],
        max_tokens: int | None = None,
        *,
        counts_reasoning: bool,
    ) -> None:
        self.id = generation.id
        self.prompt_token_ids = prompt_token_ids
        self.model = model
        self.max_tokens = max_tokens
        self.created = int(time.time())
        self.generation = generation
        self.answers = answers
        self._counts_reasoning = counts_reasoning

    def delta(self, output: RequestOutput) -> ChoiceDelta:
        """What the next output of a choice adds to it."""
        answer = self.answers[output.index]
        return ChoiceDelta(output.index, answer.push(output), output, answer.finish_reason)

    async def whole(self, receive: Receive) -> list[ChoiceAnswer]:
        """All choices, complete. Watches `receive` to see whether the client hangs up, and closes the generation.

        Raises ApiError if a choice fails or the server stops, and ClientGone if the client hangs up.
        """
        answers = []
        for index, outputs in enumerate(await collect(receive, self.generation)):
            answers.append(self._complete(index, outputs))
            await asyncio.sleep(0)  # a long choice takes milliseconds, and there may be many
        return answers

    async def feed(self, receive: Receive, push: Callable[[ChoiceDelta], Iterable[object]]) -> None:
        """Calls `push` with each delta and runs its iterator to the end. For answers that are built from events.

        Watches and raises as `whole` does.
        """

        def take(output: RequestOutput) -> None:
            for _ in push(self.delta(output)):
                pass

        await feed(receive, self.generation, take)

    def usage(self) -> Usage:
        """Tokens so far, of all choices."""
        usage = self.generation.usage()
        if self._counts_reasoning:
            reasoning_tokens = sum(answer.reasoning_tokens for answer in self.answers)
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
        return usage

    def _complete(self, index: int, outputs: list[RequestOutput]) -> ChoiceAnswer:
        answer = self.answers[index]
        pieces = [piece for output in outputs for piece in answer.push(output)]
        assert answer.finish_reason is not None, "the last output of a choice has a finish reason"
        return ChoiceAnswer(index, Turn.of(pieces), answer.finish_reason, outputs[-1].stop_reason, outputs)


class NamedEventStream(EventStream[RequestOutput]):
    """Streams a run in a protocol whose events have names.

    `begin` gives the first events, `push` the events of each delta, and `end` the last ones. `failed` writes the frame
    that ends an answer with an error.
    """

    done = b""

    def __init__(
        self,
        run: ChatRun,
        push: Callable[[ChoiceDelta], Iterable[msgspec.Struct]],
        *,
        begin: Callable[[], Iterable[msgspec.Struct]] = tuple,
        end: Callable[[], Iterable[msgspec.Struct]],
        failed: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(run.generation)
        self._run = run
        self._push_delta = push
        self._begin = begin
        self._end = end
        self._failed = failed

    def first_frame(self) -> bytes:
        """See EventStream."""
        return named_events(self._begin())

    def frame(self, output: RequestOutput) -> bytes:
        """See EventStream."""
        return named_events(self._push_delta(self._run.delta(output)))

    def last_frames(self) -> Iterator[bytes]:
        """See EventStream."""
        return map(named_event, self._end())

    def failed(self, error: ApiError) -> bytes:
        """See EventStream."""
        return self._failed(error)
