"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import chain
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.request import FinishReason, RequestOutput
from tidewheel.server.api.json_response import json_response
from tidewheel.server.api.models import ServedModels
from tidewheel.server.chat.messages import template_messages, template_tools
from tidewheel.server.chat.templates import ChatTemplate
from tidewheel.server.chat.tools import ParsedCall, ToolCallParser
from tidewheel.server.generation import Generation, Generations
from tidewheel.server.logprobs import LogprobsFormatter
from tidewheel.server.metrics import ServerMetrics
from tidewheel.server.prompts import PromptEncoder
from tidewheel.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionCall,
    ResponseMessage,
    ToolCall,
)
from tidewheel.server.protocol.decode import BodyDecoder
from tidewheel.server.protocol.sampling import sampling_params
from tidewheel.server.streaming import EventStream, collect, event


class ChatEndpoint:
    """Answers conversations.

    `defaults` are the sampling parameters that the model itself asks for. With `tool_parser`, calls in the model's
    text become `tool_calls` for requests that offer tools.
    """

    def __init__(
        self,
        models: ServedModels,
        encoder: PromptEncoder,
        template: ChatTemplate,
        generations: Generations,
        metrics: ServerMetrics,
        defaults: Mapping[str, float | int],
        fingerprint: str,
        tool_parser: Callable[[], ToolCallParser] | None,
    ) -> None:
        self._models = models
        self._encoder = encoder
        self._template = template
        self._generations = generations
        self._metrics = metrics
        self._defaults = defaults
        self._fingerprint = fingerprint
        self._tool_parser = tool_parser
        self._formatter = LogprobsFormatter(encoder.tokenizer)
        self._decode = BodyDecoder(ChatCompletionRequest)

    def routes(self) -> list[Route]:
        """The endpoint."""
        return [Route("/v1/chat/completions", self._create, methods=["POST"])]

    async def _create(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await request.body()
        body = self._decode(raw)
        model = self._models.resolve(body.model)
        body.check_supported()
        sampling = sampling_params(body, body.endpoint_sampling(), self._defaults)
        prompt = await self._encoder.run(len(raw), lambda: self._encode(body))
        constraints = await self._generations.constraints(body)
        generation = self._generations.start(
            "chatcmpl",
            [prompt],
            sampling,
            timer=timer,
            client_id=request.state.request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            constraints=constraints,
        )
        created = int(time.time())
        choices = [
            _Choice(i, self._formatter, self._parser_for(body), body.parallel_tool_calls is not False)
            for i in range(generation.num_choices)
        ]
        if body.stream:
            chunk = ChatChunk(
                id=generation.id, created=created, model=model, system_fingerprint=self._fingerprint, choices=[]
            )
            return EventStream(_frames(generation, choices, chunk, body.include_usage), generation)
        outputs = await collect(request.receive, generation)
        return json_response(
            ChatCompletion(
                id=generation.id,
                created=created,
                model=model,
                system_fingerprint=self._fingerprint,
                choices=[choice.whole(parts) for choice, parts in zip(choices, outputs, strict=True)],
                usage=generation.usage(),
            )
        )

    def _encode(self, body: ChatCompletionRequest) -> list[int]:
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        text = self._template.render(
            template_messages(body.messages),
            None if body.tool_choice == "none" else template_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )
        # The template writes the special tokens itself.
        token_ids = self._encoder.encode(text, add_special_tokens=False)
        self._encoder.check_prompt(token_ids, "messages")
        return token_ids

    def _parser_for(self, body: ChatCompletionRequest) -> ToolCallParser | None:
        if self._tool_parser is None or not body.tools or body.tool_choice == "none":
            return None
        return self._tool_parser()


class _Choice:
    """Turns the outputs of one choice into an answer or its chunks."""

    def __init__(
        self, index: int, formatter: LogprobsFormatter, parser: ToolCallParser | None, parallel_calls: bool
    ) -> None:
        self._index = index
        self._formatter = formatter
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._num_calls = 0
        self._started = False

    def whole(self, outputs: list[RequestOutput]) -> ChatChoice:
        """The choice as a message."""
        text = "".join(output.text for output in outputs)
        deltas = self._deltas(text, finished=True)
        content = "".join(delta.content for delta in deltas if delta.content is not msgspec.UNSET)
        calls = list(chain.from_iterable(d.tool_calls for d in deltas if d.tool_calls is not msgspec.UNSET))
        for call in calls:
            call.index = msgspec.UNSET
        message = ResponseMessage(content=content or (None if calls else ""))
        if calls:
            message.tool_calls = calls
        pieces = [shape.content for output in outputs if (shape := self._formatter.chat(output)) is not None]
        logprobs = ChatLogprobs(list(chain.from_iterable(pieces))) if pieces else None
        last = outputs[-1]
        return ChatChoice(self._index, message, logprobs, self._finish_reason(last), last.stop_reason)

    def chunks(self, output: RequestOutput) -> list[ChunkChoice]:
        """What one output adds; the first one also opens the turn."""
        finished = output.finish_reason is not None
        deltas = self._deltas(output.text, finished)
        logprobs = self._formatter.chat(output)
        if not deltas and (logprobs is not None or finished):
            deltas = [Delta(content="")]
        chunks = [ChunkChoice(self._index, delta) for delta in deltas]
        if not self._started:
            self._started = True
            chunks.insert(0, ChunkChoice(self._index, Delta(role="assistant", content="")))
        if chunks:
            chunks[-1].logprobs = logprobs
        if finished:
            chunks[-1].finish_reason = self._finish_reason(output)
            chunks[-1].stop_reason = output.stop_reason
        return chunks

    def _deltas(self, text: str, finished: bool) -> list[Delta]:
        if self._parser is None:
            return [Delta(content=text)] if text else []
        parts = self._parser.feed(text)
        if finished:
            parts += self._parser.finish()
        deltas = []
        for part in parts:
            if isinstance(part, str):
                deltas.append(Delta(content=part))
            elif self._parallel_calls or not self._num_calls:
                deltas.append(Delta(tool_calls=[self._tool_call(part)]))
                self._num_calls += 1
        return deltas

    def _tool_call(self, call: ParsedCall) -> ToolCall:
        return ToolCall(call.id, FunctionCall(call.name, call.arguments), index=self._num_calls)

    def _finish_reason(self, output: RequestOutput) -> str | None:
        if self._num_calls and output.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return output.finish_reason


async def _frames(
    generation: Generation, choices: list[_Choice], chunk: ChatChunk, include_usage: bool
) -> AsyncIterator[bytes]:
    if include_usage:
        chunk.usage = None
    async for index, output in generation.outputs():
        frame = b""
        for piece in choices[index].chunks(output):
            chunk.choices = [piece]
            frame += event(chunk)
        if frame:
            yield frame
    if include_usage:
        chunk.choices = []
        chunk.usage = generation.usage()
        yield event(chunk)
