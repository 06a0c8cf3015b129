"""Turns what the model writes into Ollama's answers: whole ones, or the lines of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, cast

from msgspec import UNSET

from tidewheel.engine.outputs import RequestOutput

from ..chat.pieces import Call, CallArguments, CallStart, Reasoning
from ..chat.run import ChatRun, ChoiceAnswer, ChoiceDelta
from ..chat.tools.arguments import arguments_object
from ..errors import ApiError
from ..generation.durations import durations
from ..generation.frames import encode_json
from ..generation.logprobs import LogprobsFormatter
from ..generation.streaming import EventStream
from ..protocol.ollama_answers import (
    OllamaAnswerMessage,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaToolCall,
)
from ..protocol.sampling import GenerationBody
from .times import nanoseconds, rfc3339

Answer: TypeAlias = OllamaChatAnswer | OllamaGenerateAnswer


class AnswerBuilder:
    """Builds the answers of a run that `body` asked for. `model` is the client's name for the model.

    The answers are for /api/chat or /api/generate.
    """

    def __init__(
        self,
        run: ChatRun,
        body: GenerationBody,
        model: str,
        formatter: LogprobsFormatter,
        kind: Literal["chat", "generate"],
    ) -> None:
        self._run = run
        self._body = body
        self._model = model
        self._formatter = formatter
        self._kind = kind
        self._call: tuple[CallStart, list[str]] | None = None  # the one that is being written
        self._finish_reason: str | None = None

    def push(self, delta: ChoiceDelta) -> list[Answer]:
        """What a delta adds. A call is added when it is whole."""
        lines: list[Answer] = []
        for piece in delta.pieces:
            if isinstance(piece, CallArguments):
                assert self._call is not None, "arguments follow the start of their call"
                self._call[1].append(piece.text)
                continue
            lines += self._end_call()
            if isinstance(piece, CallStart):
                self._call = (piece, [])
            elif isinstance(piece, Reasoning):
                lines.append(self._answer(thinking=piece.text))
            else:
                lines.append(self._answer(piece))
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            lines += self._end_call()
        if delta.output.logprobs is not None:
            lines = lines or [self._answer()]
            self._add_logprobs(lines[-1], [delta.output])
        return lines

    def end(self) -> Answer:
        """The last line of a stream."""
        return self._ended(self._answer(), self._finish_reason)

    def whole(self, answer: ChoiceAnswer) -> Answer:
        """The answer in one piece."""
        turn = answer.turn
        made = self._answer(turn.content, turn.reasoning, turn.calls)
        if answer.outputs[0].logprobs is not None:
            self._add_logprobs(made, answer.outputs)
        return self._ended(made, answer.finish_reason)

    def _end_call(self) -> list[Answer]:
        if self._call is None:
            return []
        (start, parts), self._call = self._call, None
        return [self._answer(calls=[Call(start.id, start.name, "".join(parts))], first_call=start.index)]

    def _answer(
        self, content: str = "", thinking: str = "", calls: Iterable[Call] = (), *, first_call: int = 0
    ) -> Answer:
        common: dict[str, Any] = {"model": self._model, "created_at": rfc3339()}
        if self._kind == "generate":
            return OllamaGenerateAnswer(response=content, thinking=thinking or UNSET, **common)
        made = [
            OllamaToolCall(call.id, OllamaCalledFunction(i, call.name, _arguments(call)))
            for i, call in enumerate(calls, first_call)
        ]
        message = OllamaAnswerMessage(content=content, thinking=thinking or UNSET, tool_calls=made or UNSET)
        return OllamaChatAnswer(message=message, **common)

    def _add_logprobs(self, answer: Answer, outputs: Iterable[RequestOutput]) -> None:
        answer.logprobs = [entry for output in outputs if (shape := self._formatter.chat(self._body, output))
                           for entry in shape.content]  # fmt: skip

    def _ended(self, answer: Answer, finish_reason: str | None) -> Answer:
        usage, took = self._run.usage(), durations(self._run.generation)
        answer.done, answer.done_reason = True, "length" if finish_reason == "length" else "stop"
        answer.total_duration, answer.load_duration = nanoseconds(took.total_s), nanoseconds(0)
        answer.prompt_eval_count, answer.prompt_eval_duration = usage.prompt_tokens, nanoseconds(took.prompt_s)
        answer.eval_count, answer.eval_duration = usage.completion_tokens, nanoseconds(took.decode_s)
        return answer


def loaded(model: str, kind: Literal["chat", "generate"], *, reason: Literal["load", "unload"] = "load") -> Answer:
    """The answer to a request that only loads the model, or unloads it."""
    common: dict[str, Any] = {"model": model, "created_at": rfc3339(), "done": True, "done_reason": reason}
    if kind == "generate":
        return OllamaGenerateAnswer(response="", **common)
    return OllamaChatAnswer(message=OllamaAnswerMessage(content=""), **common)


class LineStream(EventStream[RequestOutput]):
    """A streamed answer: one JSON object a line."""

    content_type = b"application/x-ndjson"
    done = b""

    def __init__(self, run: ChatRun, builder: AnswerBuilder) -> None:
        super().__init__(run.generation)
        self._run = run
        self._builder = builder

    def frame(self, output: RequestOutput) -> bytes:
        """See EventStream."""
        return b"".join(map(_line, self._builder.push(self._run.delta(output))))

    def last_frames(self) -> Iterator[bytes]:
        """See EventStream."""
        yield _line(self._builder.end())

    def failed(self, error: ApiError) -> bytes:
        """See EventStream."""
        return error.ollama_body() + b"\n"


def _arguments(call: Call) -> dict[str, Any]:
    return cast("dict[str, Any]", arguments_object(call.arguments))  # written as it is


def _line(answer: Answer) -> bytes:
    return encode_json(answer) + b"\n"
