"""`/v1/chat/completions/render` and `/v1/completions/render`: prompts and their token ids, and nothing generated."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..openapi.document import operation
from ..protocol.chat import ChatCompletionRequest
from ..protocol.completions import CompletionRequest
from ..protocol.decode import BodyDecoder
from ..protocol.render import RenderedRequest
from .app_state import AppState
from .body import whole_body
from .json_response import JsonParts, json_response, listed


class RenderEndpoints:
    """Shows prompts as the model would get them."""

    def __init__(self, state: AppState) -> None:
        self._path = state.path
        self._completion_path = state.completion_path
        self._encoder = state.encoder
        self._decode_chat = BodyDecoder(ChatCompletionRequest, notes=state.notes)
        self._decode_completion = BodyDecoder(CompletionRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/chat/completions/render", self._chat, methods=["POST"]),
            Route("/v1/completions/render", self._completion, methods=["POST"]),
        ]

    @operation(
        "The prompt of a conversation, without an answer",
        ChatCompletionRequest,
        RenderedRequest,
        example={"messages": [{"role": "user", "content": "Who are you?"}]},
    )
    async def _chat(self, request: Request) -> Response:
        raw = await whole_body(request)
        model, text, token_ids = await self._path.render(self._decode_chat(raw), len(raw))
        return json_response(RenderedRequest(request.state.request_id, model, text, token_ids))

    @operation(
        "The prompts of a completion, without continuations",
        CompletionRequest,
        list[RenderedRequest],
        example={"prompt": "Once upon a time"},
    )
    async def _completion(self, request: Request) -> Response:
        raw = await whole_body(request)
        model, prompts = await self._completion_path.prompts(self._decode_completion(raw), len(raw))
        client_id, tokenizer = request.state.request_id, self._encoder.tokenizer

        def rendered(token_ids: list[int]) -> RenderedRequest:
            self._encoder.check_vocabulary(token_ids, "prompt")
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            return RenderedRequest(client_id, model, text, token_ids)

        made = await self._encoder.run(len(raw), lambda: [rendered(prompt.token_ids) for prompt in prompts])
        return JsonParts(listed(made))
