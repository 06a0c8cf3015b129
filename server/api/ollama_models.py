"""Ollama's `/api/tags`, `/api/ps`, `/api/show` and `/api/version`, and what it has for models that is not done here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Container, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import bad_request
from ..ollama.names import tagged, untagged
from ..ollama.times import rfc3339
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder
from ..protocol.models import ModelCard
from ..protocol.ollama import OllamaShowRequest
from ..protocol.ollama_answers import (
    OllamaDetails,
    OllamaError,
    OllamaModel,
    OllamaModelInfo,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaVersion,
)
from .body import whole_body
from .encoder_state import EncoderState
from .json_response import json_response

if TYPE_CHECKING:
    from tidewheel.engine.core.engine import Engine

    from ..chat.model_formats import ModelFormats

API_VERSION = "0.13.0"
"""The version of Ollama's API that is spoken. Clients refuse servers that are too old for them."""

NEVER = "9999-12-31T23:59:59Z"
_REFUSED = {
    "/api/pull": ("POST", "the server serves the model that it was started with: start it with another one"),
    "/api/push": ("POST", "models are not published by this server: use the tools of the hub"),
    "/api/create": ("POST", "models are not created by this server: start it with the model, and --chat-template"),
    "/api/copy": ("POST", "models get their names when the server is started: use --served-model-name"),
    "/api/delete": ("DELETE", "downloaded models are deleted on the server's machine: use tidewheel rm"),
    "/api/blobs/{digest}": ("POST", "models are not created by this server: start it with the model's files"),
}
Capabilities = list[Literal["completion", "tools", "thinking", "insert", "vision", "embedding"]]


class OllamaModelEndpoints:
    """Tells of the served models."""

    def __init__(self, state: EncoderState, chat: OllamaChatModel | None = None) -> None:
        self._models = state.models
        self._encoders = state.encoders
        self._chat = chat
        self._decode_show = BodyDecoder(OllamaShowRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/api/tags", self._tags),
            Route("/api/ps", self._running),
            Route("/api/show", self._show, methods=["POST"]),
            *version_and_refused(),
        ]

    @operation("List the served models in Ollama's shapes", response=OllamaModels, error=OllamaError)
    async def _tags(self, request: Request) -> Response:
        await self._models.refresh()
        models = [
            OllamaModel(
                name=tagged(card.id),
                model=tagged(card.id),
                modified_at=created_at(card),
                size=self._size(card),
                digest=digest_of(card),
                details=self._details(card),
            )
            for card in self._models.cards
        ]
        return json_response(OllamaModels(models))

    @operation("List the loaded models in Ollama's shapes", response=OllamaRunningModels, error=OllamaError)
    async def _running(self, request: Request) -> Response:
        await self._models.refresh()
        models = [
            OllamaRunningModel(
                name=tagged(card.id),
                model=tagged(card.id),
                size=self._size(card),
                digest=digest_of(card),
                details=self._details(card),
                expires_at=NEVER,
                size_vram=0 if self._info(card).get("device") == "cpu" else self._size(card),
                context_length=card.max_model_len,
            )
            for card in self._models.cards
        ]
        return json_response(OllamaRunningModels(models))

    @operation(
        "One served model in Ollama's shapes",
        OllamaShowRequest,
        OllamaModelInfo,
        error=OllamaError,
        example={},
        waits=False,
    )
    async def _show(self, request: Request) -> Response:
        body = self._decode_show(await whole_body(request))
        await self._models.refresh()
        asked = untagged(body.model or body.name, [card.id for card in self._models.cards])
        card = self._models.card(asked or self._models.default)
        chat = self._chat if self._models.generates(card.id) else None
        defaults = {} if chat is None else {**self._models.chat_sampling, **chat.engine.generation_defaults}
        return json_response(
            OllamaModelInfo(
                modelfile=f"# served by Tidewheel\nFROM {card.root}\n",
                parameters="\n".join(f"{_OPTIONS.get(name, name)} {value}" for name, value in defaults.items()),
                template="" if chat is None else _template(chat.engine.tokenizer.chat_template),
                details=self._details(card),
                model_info=self._model_info(card),
                capabilities=["embedding"] if chat is None else chat.capabilities,
                modified_at=created_at(card),
            )
        )

    def _info(self, card: ModelCard) -> Mapping[str, str]:
        """What its engine says of a model."""
        if self._chat is not None and self._models.generates(card.id):
            return self._chat.info
        return self._encoders.info(card.id)

    def _size(self, card: ModelCard) -> int:
        return int(self._info(card).get("weight_bytes", 0))

    def _details(self, card: ModelCard) -> OllamaDetails:
        return details_of(self._info(card))

    def _model_info(self, card: ModelCard) -> dict[str, str | int]:
        """Under the names that GGUF files have them."""
        info = self._info(card)
        family = info.get("architecture") or "model"
        known: dict[str, str | int] = {
            "general.architecture": family,
            "general.basename": card.id,
            f"{family}.context_length": card.max_model_len,
        }
        if "width" in info:
            known[f"{family}.embedding_length"] = int(info["width"])
        if "parameters" in info:
            known["general.parameter_count"] = int(info["parameters"])
        return known


class OllamaChatModel:
    """What is told of the model that generates. `fills` says that it fills in the middle of texts."""

    def __init__(self, engine: Engine, formats: ModelFormats, *, fills: bool) -> None:
        self.engine = engine
        has = {
            "tools": formats.tool_calls is not None,
            "thinking": formats.reasoning is not None,
            "insert": fills,
            "vision": engine.media is not None,
        }
        found: Capabilities = ["completion"]
        found += [name for name in ("tools", "thinking", "insert", "vision") if has[name]]
        self.capabilities = found

    @property
    def info(self) -> Mapping[str, str]:
        """What the engine says, and the format of the files."""
        name = self.engine.model_name
        is_gguf = name.endswith(".gguf") or os.path.isfile(name)  # Ollama's own have other names
        return {**self.engine.info, "format": "gguf" if is_gguf else "safetensors"}


_OPTIONS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}


def version_and_refused(served: Container[str] = ()) -> list[Route]:
    """`/api/version`, and Ollama's endpoints that change models, which are refused but for those `served`."""
    refused = [
        Route(path, _refusal(path, reason), methods=[method])
        for path, (method, reason) in _REFUSED.items()
        if path not in served
    ]
    return [Route("/api/version", _version), *refused]


@operation("The version of Ollama whose API this is", response=OllamaVersion, error=OllamaError)
async def _version(request: Request) -> Response:
    return json_response(OllamaVersion(API_VERSION))


def _refusal(path: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    """The handler of what is refused."""

    @operation(f"Refused: {reason}", error=OllamaError)
    async def refuse(request: Request) -> Response:
        raise bad_request(f"{path} is not supported: {reason}", code="unsupported_endpoint")

    return refuse


def details_of(info: Mapping[str, str]) -> OllamaDetails:
    """What an engine says of its model."""
    family, level = info.get("architecture", ""), info.get("quantization") or info.get("dtype", "")
    parameters = _in_short(int(info.get("parameters", 0)))
    return OllamaDetails("", info.get("format", "").lower(), family, [family] if family else [], parameters, level)


def created_at(card: ModelCard) -> str:
    """When a model began to be served."""
    return rfc3339(datetime.fromtimestamp(card.created, timezone.utc))


def digest_of(card: ModelCard) -> str:
    """Stands for a digest of the model: the same for the same name, and another for another."""
    return hashlib.sha256(f"{card.root} {card.id}".encode()).hexdigest()


def _template(template: str | Mapping[str, str] | None) -> str:
    return template if isinstance(template, str) else (template or {}).get("default", "")


def _in_short(count: int) -> str:
    """A number of parameters as Ollama writes it, such as 7.2B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count) if count else ""
