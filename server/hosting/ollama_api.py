"""Ollama's `/api/tags`, `/api/ps` and `/api/show` of several models, and what downloads, copies and deletes them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import datetime, timezone
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.errors import ModelError

from ..api.body import whole_body
from ..api.json_response import HOLE, JsonParts, filled, json_response, listed
from ..api.ollama_models import NEVER, created_at, details_of, digest_of, version_and_refused
from ..client_watch import client_watch
from ..errors import ApiError, ClientGone, bad_request
from ..generation.frames import encode_json
from ..ollama.names import tagged
from ..ollama.times import rfc3339
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder, ParameterNotes
from ..protocol.ollama import OllamaCopyRequest, OllamaNamedModel, OllamaPullRequest, OllamaShowRequest
from ..protocol.ollama_answers import (
    OllamaError,
    OllamaModel,
    OllamaModelInfo,
    OllamaModels,
    OllamaProgress,
    OllamaRunningModel,
    OllamaRunningModels,
)
from .cards import RouterCards
from .file_looks import FileLooks
from .hosted_models import HostedModels
from .management import Management, required
from .passed_on import PassedOn
from .pulls import PullFailedError, hub_id
from .streamed import Streamed

_MANAGED = ("/api/pull", "/api/copy", "/api/delete")
_LINES = b"application/x-ndjson"


class HostedOllamaEndpoints:
    """Tells of all models, and changes which there are."""

    def __init__(
        self, models: HostedModels, cards: RouterCards, management: Management | None, notes: ParameterNotes
    ) -> None:
        self._models = models
        self._cards = cards
        self._management = management
        self._files = FileLooks()
        self._decode_show = BodyDecoder(OllamaShowRequest, notes=notes)
        self._decode_pull = BodyDecoder(OllamaPullRequest, notes=notes)
        self._decode_delete = BodyDecoder(OllamaNamedModel, notes=notes)
        self._decode_copy = BodyDecoder(OllamaCopyRequest, notes=notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/api/tags", self._tags),
            Route("/api/ps", self._running),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/pull", self._pull, methods=["POST"]),
            Route("/api/delete", self._delete, methods=["DELETE"]),
            Route("/api/copy", self._copy, methods=["POST"]),
            *version_and_refused(_MANAGED),
        ]

    @operation("List all models in Ollama's shapes", response=OllamaModels, error=OllamaError)
    async def _tags(self, request: Request) -> Response:
        return JsonParts(filled(OllamaModels(models=HOLE), listed(self._tagged())))

    @operation("List the loaded models in Ollama's shapes", response=OllamaRunningModels, error=OllamaError)
    async def _running(self, request: Request) -> Response:
        models = []
        for card in self._cards.loaded():
            name, info = tagged(card.id), self._cards.info(card.id)
            size = card.memory_bytes or int(info.get("weight_bytes", 0))
            models.append(
                OllamaRunningModel(
                    name=name,
                    model=name,
                    size=size,
                    digest=digest_of(card),
                    details=details_of(info),
                    expires_at=_time(card.expires_at),
                    size_vram=0 if info.get("device") == "cpu" else size,
                    context_length=card.max_model_len,
                )
            )
        return json_response(OllamaRunningModels(models))

    def _tagged(self) -> Iterator[OllamaModel]:
        for card in self._cards.all():
            if card.status.value != "downloading":
                name, info = tagged(card.id), self._cards.info(card.id)
                yield OllamaModel(
                    name=name,
                    model=name,
                    modified_at=created_at(card),
                    size=int(info.get("weight_bytes", 0)) or card.file_bytes,
                    digest=digest_of(card),
                    details=details_of(info),
                )

    @operation(
        "One model in Ollama's shapes; a model that is not loaded is known by its files alone",
        OllamaShowRequest,
        OllamaModelInfo,
        error=OllamaError,
        example={},
        waits=False,
    )
    async def _show(self, request: Request) -> Response:
        raw = await whole_body(request)
        body = self._decode_show(raw)
        entry = self._models.find(body.model or body.name)
        if (loaded := self._models.unit(entry).loaded) is not None:
            return PassedOn(loaded.app(entry.name), raw)
        card = self._cards.card(entry)
        known = await self._files.look(entry)
        family = known.info.get("architecture") or "model"
        told: dict[str, str | int] = {"general.architecture": family, "general.basename": card.id}
        if known.context is not None:
            told[f"{family}.context_length"] = min(known.context, entry.max_model_len or known.context)
        if "parameters" in known.info:
            told["general.parameter_count"] = int(known.info["parameters"])
        return json_response(
            OllamaModelInfo(
                modelfile=f"# served by Tidewheel\nFROM {card.root}\n",
                parameters="",
                template="",
                details=details_of(known.info),
                model_info=told,
                capabilities=known.capabilities,
                modified_at=created_at(card),
            )
        )

    @operation(
        "Download a model of the hub, and serve it",
        OllamaPullRequest,
        OllamaProgress,
        events=OllamaProgress,
        stream_type="application/x-ndjson",
        error=OllamaError,
        example={"model": "owner/name:Q4_K_M"},
        administers=True,
    )
    async def _pull(self, request: Request) -> Response:
        management = required(self._management)
        body = self._decode_pull(await whole_body(request))
        lines = _pull_lines(management, hub_id(body.asked()))
        if body.stream is not False:
            return Streamed(lines, _LINES, lambda error: error.ollama_body() + b"\n")
        reading = asyncio.create_task(_last(lines))
        with client_watch(request.receive, reading.cancel):
            await asyncio.wait([reading])
        if reading.cancelled():
            raise ClientGone
        return Response(reading.result(), media_type="application/json")

    @operation(
        "Delete a downloaded model, or a copy",
        OllamaNamedModel,
        error=OllamaError,
        example={"model": "owner/name:Q4_K_M"},
        waits=False,
        administers=True,
    )
    async def _delete(self, request: Request) -> Response:
        management = required(self._management)
        await management.delete(self._decode_delete(await whole_body(request)).asked())
        return Response()

    @operation(
        "Serve a model by one more name",
        OllamaCopyRequest,
        error=OllamaError,
        example={"source": "qwen", "destination": "coder"},
        waits=False,
        administers=True,
    )
    async def _copy(self, request: Request) -> Response:
        management = required(self._management)
        body = self._decode_copy(await whole_body(request))
        await management.copy(body.source, body.destination.removesuffix(":latest"))
        return Response()


async def _pull_lines(management: Management, model: str) -> AsyncGenerator[bytes, None]:
    """The lines of a download. Raises ApiError if it cannot begin, or fails."""
    digest = hashlib.sha256(model.encode()).hexdigest()
    try:
        async with management.pulls.join(model) as pull:
            async for completed, total in pull.follow():
                progress = OllamaProgress(status="pulling manifest")
                if total:
                    progress = OllamaProgress(
                        status=f"pulling {digest[:12]}", digest=f"sha256:{digest}", total=total, completed=completed
                    )
                yield _line(progress)
    except PullFailedError as error:
        raise ApiError(HTTPStatus.BAD_GATEWAY, str(error), code="download_failed") from error
    except ModelError as error:
        raise bad_request(str(error), "model") from error
    yield _line(OllamaProgress(status="success"))


async def _last(lines: AsyncGenerator[bytes, None]) -> bytes:
    last = b""
    async with aclosing(lines):
        async for line in lines:
            last = line
    return last


def _line(progress: OllamaProgress) -> bytes:
    return encode_json(progress) + b"\n"


def _time(moment: float | None) -> str:
    """When a model will be unloaded; None is never."""
    if moment is None:
        return NEVER
    try:
        return rfc3339(datetime.fromtimestamp(moment, timezone.utc))
    except (OverflowError, ValueError, OSError):  # in more years than a time has
        return NEVER
