"""`/v1/chat/completions`: the chat path in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.outputs import RequestOutput

from ..chat.pieces import CallArguments, CallStart, Piece, Reasoning
from ..chat.run import ChatRun, ChoiceAnswer
from ..generation.frames import around_text, encode_json, event
from ..generation.logprobs import LogprobsFormatter, places_at_once
from ..generation.streaming import EventStream
from ..openapi.document import operation
from ..protocol.chat import (
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
from ..protocol.decode import BodyDecoder
from ..protocol.usage import Usage
from .app_state import AppState
from .body import whole_body
from .json_response import HOLE, JsonParts, filled, listed


class ChatEndpoint:
    """Answers conversations in OpenAI's shapes."""

    def __init__(self, state: AppState, *, role: str) -> None:
        self._path = state.path
        self._formatter = state.formatter
        self._metrics = state.metrics
        self._fingerprint = state.fingerprint
        self._decode = BodyDecoder(ChatCompletionRequest, notes=state.notes)
        self._role = role

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
        raw = await whole_body(request)
        body = self._decode(raw)
        run = await self._path.start(body, len(raw), timer, request.state.request_id, receive=request.receive)
        if body.stream:
            return _ChunkStream(run, body, self._formatter, self._fingerprint, self._role_in(body))
        answers = await run.whole(request.receive)
        completion = ChatCompletion(
            id=run.id,
            created=run.created,
            model=run.model,
            system_fingerprint=self._fingerprint,
            choices=HOLE,
            usage=run.usage(),
        )
        holes = [self._choices(answers, body)]
        if body.return_token_ids:
            completion.prompt_token_ids = run.prompt_token_ids
        if body.prompt_logprobs is not None:
            completion.prompt_logprobs = HOLE
            scores = answers[0].outputs[0].prompt_logprobs
            places = self._formatter.prompt(run.prompt_token_ids, scores, body.prompt_logprobs)
            holes.append(listed(places, places_at_once(body.prompt_logprobs)))
        return JsonParts(filled(completion, *holes))

    def _choices(self, answers: Sequence[ChoiceAnswer], body: ChatCompletionRequest) -> Iterator[bytes]:
        """Parts of the JSON of the choices."""
        for i, answer in enumerate(answers):
            yield b"," if i else b"["
            choice, holes = self._choice(answer, body), []
            if answer.outputs[0].logprobs is not None:
                choice.logprobs = ChatLogprobs(HOLE)
                entries = self._formatter.chat_entries(body, answer.outputs)
                holes.append(listed(entries, places_at_once(body.top_logprobs or 0)))
            yield from filled(choice, *holes)
        yield b"]"

    def _choice(self, answer: ChoiceAnswer, body: ChatCompletionRequest) -> ChatChoice:
        turn = answer.turn
        content = turn.content or (None if turn.calls or turn.reasoning else "")
        message = ResponseMessage(role=self._role_in(body), content=content)
        if turn.reasoning:
            message.reasoning_content = message.reasoning = turn.reasoning
        if turn.calls:
            message.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in turn.calls
            ]
        choice = ChatChoice(answer.index, message, None, answer.finish_reason, answer.stop_reason)
        if body.return_token_ids:
            choice.token_ids = [token for output in answer.outputs for token in output.token_ids]
        return choice

    def _role_in(self, body: ChatCompletionRequest) -> str:
        """The role of an answer. If it continues a message, it is that message's role."""
        opens_turn = body.add_generation_prompt is not False and not body.continue_final_message
        return self._role if opens_turn else body.messages[-1].role


class _ChunkStream(EventStream[RequestOutput]):
    """A streamed answer, in chunks."""

    __slots__ = ("_answers", "_around_text")

    def __init__(
        self, run: ChatRun, body: ChatCompletionRequest, formatter: LogprobsFormatter, fingerprint: str, role: str
    ) -> None:
        super().__init__(run.generation)
        self._run = run
        self._role = role
        self._answers = run.answers
        self._logprobs_of = partial(formatter.chat, body)
        self._include_usage, self._continuous_usage = body.include_usage, body.continuous_usage
        self._return_ids = bool(body.return_token_ids)
        self._chunk = ChatChunk(
            id=run.id, created=run.created, model=run.model, system_fingerprint=fingerprint, choices=[]
        )
        if self._include_usage:
            self._chunk.usage = None
        if self._return_ids:
            self._chunk.prompt_token_ids = run.prompt_token_ids
        # Most frames of a choice differ only in their text. A choice has an entry once it has opened its turn.
        self._around_text: dict[int, tuple[bytes, bytes] | None] = {}

    def frame(self, output: RequestOutput) -> bytes:
        index = output.index
        around = self._around_text.get(index)
        begins = around is None and index not in self._around_text
        usage_before = self._usage_before(output) if begins and self._continuous_usage else None
        pieces = self._answers[index].push(output)
        if around is not None and len(pieces) == 1 and output.finish_reason is None and output.logprobs is None:
            piece = pieces[0]
            if isinstance(piece, str):
                return around[0] + encode_json(piece) + around[1]
        choices, chunk = self._choices(output, pieces), self._chunk
        if begins:
            opening = ChunkChoice(index, Delta(role=self._role, content=""))
            choices.insert(0, opening)
            if self._continuous_usage or self._return_ids:
                self._around_text[index] = None
            else:
                chunk.choices = [ChunkChoice(index, Delta(content=""))]
                self._around_text[index] = around_text(chunk, "content")
        usage = self._run.usage() if self._continuous_usage else None
        frames = b""
        for choice in choices:
            chunk.choices = [choice]
            if usage is not None:
                chunk.usage, usage_before = usage_before or usage, None
            frames += event(chunk)
            chunk.prompt_token_ids = UNSET
        return frames

    def _usage_before(self, output: RequestOutput) -> Usage:
        usage = self._run.usage()
        usage.completion_tokens -= len(output.token_ids)
        usage.total_tokens -= len(output.token_ids)
        return usage

    def last_frames(self) -> Iterator[bytes]:
        if not self._include_usage:
            return
        self._chunk.choices = []
        self._chunk.usage = self._run.usage()
        yield event(self._chunk)

    def _choices(self, output: RequestOutput, pieces: Sequence[Piece]) -> list[ChunkChoice]:
        logprobs, finish_reason = self._logprobs_of(output), self._answers[output.index].finish_reason
        token_ids = list(output.token_ids) if self._return_ids else UNSET
        choices = [ChunkChoice(output.index, _delta(piece)) for piece in pieces]
        if not choices and (logprobs is not None or finish_reason is not None or token_ids):
            choices = [ChunkChoice(output.index, Delta(content=""))]
        if choices:
            choices[-1].logprobs = logprobs
            choices[-1].finish_reason = finish_reason
            choices[-1].stop_reason = output.stop_reason
            choices[-1].token_ids = token_ids
        return choices


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
