"""`/v1/chat/completions`: OpenAI's shapes around the chat path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import chain

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.server.api.json_response import json_response
from tidewheel.server.chat.path import ChatPath, ChatRun, ChoiceAnswer, ChoiceDelta
from tidewheel.server.chat.pieces import CallArguments, CallStart, Piece, Reasoning
from tidewheel.server.logprobs import LogprobsFormatter
from tidewheel.server.metrics import ServerMetrics
from tidewheel.server.openapi import operation
from tidewheel.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ResponseMessage,
    ToolCall,
    ToolCallDelta,
)
from tidewheel.server.protocol.decode import BodyDecoder
from tidewheel.server.streaming import EventStream, encode_json, event


class ChatEndpoint:
    """Answers conversations in OpenAI's shapes."""

    def __init__(self, path: ChatPath, formatter: LogprobsFormatter, metrics: ServerMetrics, fingerprint: str) -> None:
        self._path = path
        self._formatter = formatter
        self._metrics = metrics
        self._fingerprint = fingerprint
        self._decode = BodyDecoder(ChatCompletionRequest)

    def routes(self) -> list[Route]:
        """The endpoint."""
        return [Route("/v1/chat/completions", self._create, methods=["POST"])]

    @operation(
        "Answer a conversation",
        ChatCompletionRequest,
        ChatCompletion,
        events=ChatChunk,
        example={"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 32},
    )
    async def _create(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await request.body()
        body = self._decode(raw)
        run = await self._path.start(body, len(raw), timer, request.state.request_id)
        if body.stream:
            return EventStream(self._frames(run, body.include_usage), run.generation)
        answers = await run.whole(request.receive)
        return json_response(
            ChatCompletion(
                id=run.id,
                created=run.created,
                model=run.model,
                system_fingerprint=self._fingerprint,
                choices=[self._choice(answer) for answer in answers],
                usage=run.usage(),
            )
        )

    def _choice(self, answer: ChoiceAnswer) -> ChatChoice:
        turn = answer.turn
        message = ResponseMessage(content=turn.content or (None if turn.calls or turn.reasoning else ""))
        if turn.reasoning:
            message.reasoning_content = message.reasoning = turn.reasoning
        if turn.calls:
            message.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in turn.calls
            ]
        shapes = [shape.content for output in answer.outputs if (shape := self._formatter.chat(output)) is not None]
        logprobs = ChatLogprobs(list(chain.from_iterable(shapes))) if shapes else None
        return ChatChoice(answer.index, message, logprobs, answer.finish_reason, answer.stop_reason)

    async def _frames(self, run: ChatRun, include_usage: bool) -> AsyncIterator[bytes]:
        chunk = ChatChunk(
            id=run.id, created=run.created, model=run.model, system_fingerprint=self._fingerprint, choices=[]
        )
        if include_usage:
            chunk.usage = None
        # Most frames of a choice differ in their text alone. Until a choice has opened its turn it has no entry.
        around_text: dict[int, tuple[bytes, bytes]] = {}
        async for delta in run.deltas():
            index, pieces = delta.index, delta.pieces
            around = around_text.get(index)
            if around and len(pieces) == 1 and delta.finish_reason is None and delta.output.logprobs is None:
                piece = pieces[0]
                if isinstance(piece, str):
                    yield around[0] + encode_json(piece) + around[1]
                    continue
            choices = self._chunk_choices(delta)
            if around is None:
                around_text[index] = _around_text(chunk, index)
                choices.insert(0, ChunkChoice(index, Delta(role="assistant", content="")))
            frame = b""
            for choice in choices:
                chunk.choices = [choice]
                frame += event(chunk)
            if frame:
                yield frame
        if include_usage:
            chunk.choices = []
            chunk.usage = run.usage()
            yield event(chunk)

    def _chunk_choices(self, delta: ChoiceDelta) -> list[ChunkChoice]:
        logprobs = self._formatter.chat(delta.output)
        choices = [ChunkChoice(delta.index, _delta(piece)) for piece in delta.pieces]
        if not choices and (logprobs is not None or delta.finish_reason is not None):
            choices = [ChunkChoice(delta.index, Delta(content=""))]
        if choices:
            choices[-1].logprobs = logprobs
            choices[-1].finish_reason = delta.finish_reason
            choices[-1].stop_reason = delta.output.stop_reason
        return choices


def _around_text(chunk: ChatChunk, index: int) -> tuple[bytes, bytes]:
    """What comes before and after the text, as JSON, in the frame of a delta that is text and nothing else."""
    chunk.choices = [ChunkChoice(index, Delta(content=""))]
    before, _, after = event(chunk).partition(b'"content":""')
    return before + b'"content":', after


def _delta(piece: Piece) -> Delta:
    if isinstance(piece, str):
        return Delta(content=piece)
    if isinstance(piece, Reasoning):
        return Delta(reasoning_content=piece.text, reasoning=piece.text)
    if isinstance(piece, CallStart):
        function = FunctionCallDelta(arguments="", name=piece.name)
        return Delta(tool_calls=[ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)])
    assert isinstance(piece, CallArguments)
    return Delta(tool_calls=[ToolCallDelta(index=piece.index, function=FunctionCallDelta(arguments=piece.text))])
