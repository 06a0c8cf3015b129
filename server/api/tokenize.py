"""`/tokenize` and `/detokenize`, and `/tokenizer_info` if an option turns it on."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..chat.request_prompts import counted
from ..errors import bad_request
from ..openapi.document import operation
from ..protocol.chat import frames_per_second
from ..protocol.decode import BodyDecoder
from ..protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from .app_state import AppState
from .body import whole_body
from .json_response import json_response

_NAMED = ("bos_token", "eos_token", "pad_token")


class TokenizeEndpoints:
    """Text or messages to token ids, and back."""

    _shows_tokenizer = False

    def __init__(self, state: AppState, *, shows_tokenizer: bool) -> None:
        self._models = state.models
        self._encoder = state.encoder
        self._renderer = state.renderer
        self._images = state.images
        self._shows_tokenizer = shows_tokenizer
        self._decode_tokenize = BodyDecoder(TokenizeRequest, notes=state.notes)
        self._decode_detokenize = BodyDecoder(DetokenizeRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            *([Route("/tokenizer_info", self._info)] if self._shows_tokenizer else ()),
        ]

    @operation("Text or messages to token ids", TokenizeRequest, TokenizeResponse, example={"prompt": "high tide"})
    async def _tokenize(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_tokenize(raw)
        await self._models.resolve(body.model)
        await self._images.read(
            body.messages or (),
            len(raw),
            self._encoder.max_counted,
            settings=body.mm_processor_kwargs,
            fps=frames_per_second(body.media_io_kwargs),
        )
        return await self._renderer.run(len(raw), body.chat_template, lambda: self._tokenized(body))

    def _tokenized(self, body: TokenizeRequest) -> Response:
        tokens, name = self._encode(body), self._encoder.tokenizer.id_to_token
        strings = [name(token) or "" for token in tokens] if body.return_token_strs else None
        return json_response(TokenizeResponse(len(tokens), self._encoder.max_model_len, tokens, strings))

    def _encode(self, body: TokenizeRequest) -> list[int]:
        if body.messages is None:
            if body.prompt is None:
                raise bad_request("prompt or messages is required", "prompt", "missing_required_parameter")
            special = body.add_special_tokens is not False
            return self._encoder.count(body.prompt, "prompt", add_special_tokens=special)
        if body.prompt is not None:
            raise bad_request("prompt and messages exclude each other", "prompt")
        prompt = self._renderer.render(
            body.messages,
            body.tools,
            variables=body.chat_template_kwargs,
            template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        return counted(self._encoder, prompt, add_special_tokens=bool(body.add_special_tokens))

    @operation("Token ids to text", DetokenizeRequest, DetokenizeResponse, example={"tokens": [72, 105]}, waits=False)
    async def _detokenize(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_detokenize(raw)
        await self._models.resolve(body.model)
        return await self._encoder.run(len(raw), lambda: self._detokenized(body))

    def _detokenized(self, body: DetokenizeRequest) -> Response:
        self._encoder.tokenizer.require_text("tokens")
        self._encoder.check_vocabulary(body.tokens, "tokens")
        return json_response(DetokenizeResponse(self._encoder.tokenizer.decode(body.tokens, skip_special_tokens=False)))

    @operation("What the tokenizer's files say of it", response=TokenizerInfo)
    async def _info(self, request: Request) -> Response:
        tokenizer = self._encoder.tokenizer
        tokenizer.require_text("/tokenizer_info")
        tokens = dict(tokenizer.special_tokens_map)
        named = {name: token for name in _NAMED if isinstance(token := tokens.get(name), str)}
        return json_response(
            TokenizerInfo(
                tokenizer_class=tokenizer.class_name,
                vocab_size=tokenizer.vocab_size,
                model_max_length=self._encoder.max_model_len,
                special_tokens=await self._encoder.run(tokenizer.vocab_size, tokenizer.special_ids),
                special_tokens_map=tokens,
                chat_template=tokenizer.chat_template,
                **named,
            )
        )
