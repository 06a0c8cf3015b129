"""`/load`, `/server_info` and `/reset_prefix_cache`, for those who run the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel import __version__
from tidewheel.engine.core.engine import Engine

from ..chat.model_formats import ModelFormats
from ..http.api_keys import current_tenant
from ..http.rights import require_administrator
from ..openapi.document import operation
from .json_response import json_response


class Load(msgspec.Struct):
    """How busy the server is, in sequences; `server_load` is all of them. `kv_cache_usage` 1 is a full cache."""

    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float


class ServerInfo(msgspec.Struct):
    """What is served, with which software, and the options it was started with, without secrets.

    `options` are for keys that may administer; others get none.

    `tool_call_parser` and `reasoning_parser` name the parsers in use, None where there is none.
    """

    version: str
    model: str
    max_model_len: int
    kv_cache_blocks: int
    kv_cache_block_size: int
    engine: Mapping[str, str]
    tool_call_parser: str | None
    reasoning_parser: str | None
    options: Mapping[str, Any]


def operations_routes(engine: Engine, model: str, formats: ModelFormats, options: Mapping[str, Any]) -> list[Route]:
    """The endpoints. `model` and `options` are what `/server_info` shows of the model's source and the command line."""

    @operation("How busy the server is", response=Load)
    async def load(request: Request) -> Response:
        stats = engine.stats()
        busy = stats.num_running + stats.num_waiting
        usage = stats.kv_blocks_used / stats.kv_blocks_total
        return json_response(Load(busy, stats.num_running, stats.num_waiting, usage))

    @operation("What is served, and with which options", response=ServerInfo)
    async def server_info(request: Request) -> Response:
        limits = engine.limits
        return json_response(
            ServerInfo(
                version=__version__,
                model=model,
                max_model_len=engine.max_model_len,
                kv_cache_blocks=limits.num_blocks,
                kv_cache_block_size=limits.block_size,
                engine=engine.info,
                tool_call_parser=formats.tool_calls,
                reasoning_parser=formats.reasoning,
                options=options if current_tenant().administers else {},
            )
        )

    @operation("Forget all cached prefixes", administers=True)
    async def reset_prefix_cache(request: Request) -> Response:
        require_administrator()
        engine.reset_prefix_cache()
        return Response()

    return [
        Route("/load", load),
        Route("/server_info", server_info),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    ]
