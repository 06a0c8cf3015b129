"""Ollama's `/api/chat` and `/api/generate`."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..chat.answer import Answer
from ..chat.field_names import renamed_fields
from ..chat.run import ChatRun
from ..default_sampling import fill_in
from ..errors import bad_request
from ..ollama.answers import AnswerBuilder, LineStream, loaded
from ..ollama.names import tagged, untagged
from ..ollama.translation import FIELD_NAMES, chat_request, completion_request, generate_request
from ..openapi.document import operation
from ..protocol.chat import ChatCompletionRequest
from ..protocol.completions import CompletionRequest
from ..protocol.decode import BodyDecoder
from ..protocol.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationBody,
)
from ..protocol.ollama_answers import (
    OllamaChatAnswer,
    OllamaError,
    OllamaGenerateAnswer,
)
from ..protocol.sampling import GenerationBody
from ..telemetry.metrics import RequestTimer
from .app_state import AppState
from .body import whole_body
from .json_response import json_response

Kind = Literal["chat", "generate"]


class OllamaEndpoints:
    """Answers conversations and prompts in Ollama's shapes."""

    def __init__(self, state: AppState) -> None:
        self._models = state.models
        self._path = state.path
        self._completion_path = state.completion_path
        self._encoder = state.encoder
        self._formatter = state.formatter
        self._metrics = state.metrics
        self._thinks = state.formats.reasoning is not None
        self._decode_chat = BodyDecoder(OllamaChatRequest, notes=state.notes)
        self._decode_generate = BodyDecoder(OllamaGenerateRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/api/chat", self._chat, methods=["POST"]),
            Route("/api/generate", self._generate, methods=["POST"]),
        ]

    @operation(
        "Answer a conversation in Ollama's shapes",
        OllamaChatRequest,
        OllamaChatAnswer,
        events=OllamaChatAnswer,
        stream_type="application/x-ndjson",
        error=OllamaError,
        example={
            "messages": [{"role": "user", "content": "Who are you?"}],
            "options": {"num_predict": 32},
            "stream": False,
        },
    )
    async def _chat(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await whole_body(request)
        body = self._decode_chat(raw)
        model = await self._model(body)
        sees = self._path.sees_images
        chat, names = await self._path.translated(len(raw), lambda: chat_request(body, model, sees_images=sees))
        fill_in(chat, self._models.chat_sampling)
        if not body.messages:
            return json_response(loaded(self._named(body), "chat"))
        with renamed_fields(names):
            run = await self._run(request, body, chat, len(raw), timer)
        return await self._answered(request, run, body, chat, "chat")

    @operation(
        "Answer a prompt, or continue a text, in Ollama's shapes",
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        events=OllamaGenerateAnswer,
        stream_type="application/x-ndjson",
        error=OllamaError,
        example={"prompt": "Who are you?", "options": {"num_predict": 32}, "stream": False},
    )
    async def _generate(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await whole_body(request)
        body = self._decode_generate(raw)
        model = await self._model(body)
        body.check_supported()
        if not body.prompt and not body.suffix and not body.images:
            return json_response(loaded(self._named(body), "generate"))
        if body.continues_text:
            completion = completion_request(body, model, self._encoder.max_model_len)
            fill_in(completion, self._models.chat_sampling)
            with renamed_fields(FIELD_NAMES):
                run = await self._continued(request, completion, len(raw), timer)
            return await self._answered(request, run, body, completion, "generate")
        sees = self._path.sees_images
        chat, names = await self._path.translated(len(raw), lambda: generate_request(body, model, sees_images=sees))
        fill_in(chat, self._models.chat_sampling)
        with renamed_fields(names):
            run = await self._run(request, body, chat, len(raw), timer)
        return await self._answered(request, run, body, chat, "generate")

    async def _run(
        self,
        request: Request,
        body: OllamaGenerationBody,
        chat: ChatCompletionRequest,
        raw_size: int,
        timer: RequestTimer,
    ) -> ChatRun:
        if body.think and not self._thinks:
            raise bad_request(
                "think is not supported by this model, whose reasoning is not parsed: leave it out, or start the "
                "server with the --reasoning-parser of its model",
                "think",
            )
        if body.truncate:
            chat.messages = await self._path.fitting_messages(chat, raw_size, request.receive)
        return await self._path.start(chat, raw_size, timer, request.state.request_id, receive=request.receive)

    async def _continued(
        self, request: Request, completion: CompletionRequest, raw_size: int, timer: RequestTimer
    ) -> ChatRun:
        run = await self._completion_path.start(completion, raw_size, timer, request.state.request_id)
        answer = Answer(self._encoder.tokenizer)  # without parsers, all of it is text
        return ChatRun(run.generation, run.model, run.prompts[0].token_ids, [answer], counts_reasoning=False)

    async def _answered(
        self, request: Request, run: ChatRun, body: OllamaGenerationBody, translated: GenerationBody, kind: Kind
    ) -> Response:
        builder = AnswerBuilder(run, translated, self._named(body), self._formatter, kind)
        if body.stream is not False:
            return LineStream(run, builder)
        (answer,) = await run.whole(request.receive)
        return json_response(builder.whole(answer))

    async def _model(self, body: OllamaGenerationBody) -> str:
        await self._models.refresh()
        return await self._models.resolve(untagged(body.model, [card.id for card in self._models.cards]))

    def _named(self, body: OllamaGenerationBody) -> str:
        return tagged(self._models.default) if body.model is None else body.model
