"""`/health`, `/ping` and `/version`, for probes."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel import __version__

from ..errors import ApiError
from ..openapi.document import operation
from .json_response import json_response

if TYPE_CHECKING:
    from tidewheel.engine.core.engine import Engine
    from tidewheel.engine.encoders.engine import EncoderEngine


class Health(msgspec.Struct):
    """A server that serves."""

    status: str = "ok"


class Version(msgspec.Struct):
    """Tidewheel's version."""

    version: str = __version__


def health_routes(*engines: Engine | EncoderEngine) -> list[Route]:
    """`/health` is 200 while all engines run and 503 once one has failed; SageMaker calls it `/ping`."""

    @operation("Whether the server serves", response=Health)
    async def health(request: Request) -> Response:
        for engine in engines:
            if engine.failure is not None:
                raise ApiError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"the engine has failed: {engine.failure}",
                    code="engine_unavailable",
                )
        return json_response(Health())

    @operation("The server's version", response=Version)
    async def version(request: Request) -> Response:
        return json_response(Version())

    return [
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
    ]
