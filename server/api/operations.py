"""`/load`, `/server_info` and `/reset_prefix_cache`, for those who run the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel import __version__

from ..http.api_keys import current_tenant
from ..http.rights import require_administrator
from ..openapi.document import operation
from .json_response import json_response

if TYPE_CHECKING:
    from tidewheel.engine.core.engine import Engine
    from tidewheel.engine.encoders.engine import EncoderEngine

    from ..chat.model_formats import ModelFormats


class Load(msgspec.Struct):
    """How busy the server is, in sequences; `server_load` is all of them. `kv_cache_usage` 1 is a full cache."""

    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float


class ServerInfo(msgspec.Struct, kw_only=True):
    """What is served, with which software, and the options it was started with, without secrets.

    `options` are for keys that may administer; others get none.
    """

    version: str = __version__
    model: str
    max_model_len: int
    engine: Mapping[str, str]
    options: Mapping[str, Any]


class ChatServerInfo(ServerInfo, kw_only=True):
    """The same of a server with a chat model.

    `tool_call_parser` and `reasoning_parser` name the parsers in use, None where there is none.
    """

    kv_cache_blocks: int
    kv_cache_block_size: int
    tool_call_parser: str | None
    reasoning_parser: str | None


def load_of(engine: Engine) -> Load:
    """How busy a chat model is."""
    stats = engine.stats()
    busy = stats.num_running + stats.num_waiting
    return Load(busy, stats.num_running, stats.num_waiting, stats.kv_blocks_used / stats.kv_blocks_total)


def encoder_load_of(engine: EncoderEngine) -> Load:
    """How busy encoders are."""
    waiting = sum(figures.inputs_waiting for figures in engine.stats().values())
    busy = max(engine.backlog, waiting)
    return Load(busy, busy - waiting, waiting, 0.0)


def operations_routes(
    engine: Engine, model: str, max_model_len: int, formats: ModelFormats, options: Mapping[str, Any]
) -> list[Route]:
    """The endpoints. `model`, its context in tokens and `options` are what `/server_info` shows of the model's source
    and the command line.
    """

    @operation("How busy the server is", response=Load)
    async def load(request: Request) -> Response:
        return json_response(load_of(engine))

    @operation("What is served, and with which options", response=ChatServerInfo)
    async def server_info(request: Request) -> Response:
        limits = engine.limits
        return json_response(
            ChatServerInfo(
                model=model,
                max_model_len=max_model_len,
                kv_cache_blocks=limits.num_blocks,
                kv_cache_block_size=limits.block_size,
                engine=engine.info,
                tool_call_parser=formats.tool_calls,
                reasoning_parser=formats.reasoning,
                options=shown_to_tenant(options),
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


def encoder_operations_routes(engine: EncoderEngine, model: str, options: Mapping[str, Any]) -> list[Route]:
    """The endpoints of a server of encoders alone, whose texts do not fill a cache."""

    @operation("How busy the server is", response=Load)
    async def load(request: Request) -> Response:
        return json_response(encoder_load_of(engine))

    @operation("What is served, and with which options", response=ServerInfo)
    async def server_info(request: Request) -> Response:
        first = next(iter(engine.encoders.values()))
        return json_response(
            ServerInfo(model=model, max_model_len=first.max_length, engine=first.info, options=shown_to_tenant(options))
        )

    return [Route("/load", load), Route("/server_info", server_info)]


def shown_to_tenant(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that the current tenant may see."""
    return options if current_tenant().administers else {}
