"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that come and go while the server runs."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tidewheel.engine.adapters.options import LoraModule
from tidewheel.engine.adapters.registry import LoraExistsError, LoraRegistry, UnknownLoraError
from tidewheel.engine.errors import BusyError, TidewheelError, quoted

from ..errors import ApiError, bad_request
from ..http.rights import require_administrator
from ..openapi.document import operation
from ..protocol.adapters import LoadLoraRequest, UnloadLoraRequest
from ..protocol.decode import BodyDecoder, ParameterNotes
from ..served_models import ServedModels, too_many_downloads
from ..shared_adapters import SharedAdapters
from .body import whole_body

_LOAD_PATH, _UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# No system has longer paths. Names are listed, and shown in errors, in metrics and the log.
_MAX_CHARACTERS = {"lora_name": 256, "lora_path": 4096}


class AdapterEndpoints:
    """Loads and unloads adapters: this server's own, or those that are `shared` with other replicas."""

    def __init__(
        self, loras: LoraRegistry, models: ServedModels, shared: SharedAdapters | None, *, notes: ParameterNotes
    ) -> None:
        self._loras = loras
        self._shared = shared
        self._models = models
        self._decode_load = BodyDecoder(LoadLoraRequest, notes=notes)
        self._decode_unload = BodyDecoder(UnloadLoraRequest, notes=notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route(_LOAD_PATH, self._load, methods=["POST"]),
            Route(_UNLOAD_PATH, self._unload, methods=["POST"]),
        ]

    @operation(
        "Load a LoRA adapter",
        LoadLoraRequest,
        str,
        media_type="text/plain",
        example={"lora_name": "poems", "lora_path": "/adapters/poems"},
        waits=False,
        administers=True,
    )
    async def _load(self, request: Request) -> Response:
        require_administrator()
        body = self._decode_load(await whole_body(request))
        if not body.lora_name or not body.lora_path:
            raise bad_request("lora_name and lora_path must not be empty")
        for field, value in (("lora_name", body.lora_name), ("lora_path", body.lora_path)):
            if len(value) > _MAX_CHARACTERS[field]:
                raise bad_request(f"{field} must have at most {_MAX_CHARACTERS[field]} characters", field)
            if not value.isprintable():
                raise bad_request(f"{field} must have only printable characters, got {quoted(value)}", field)
        try:
            self._models.check_new(body.lora_name)
            module, replace = LoraModule(body.lora_name, body.lora_path), body.load_inplace is True
            if self._shared is None:
                await self._loras.add(module, replace=replace)
            else:
                await self._shared.add(module, replace=replace, model=self._models.default)
        except LoraExistsError as error:
            raise bad_request(f"{error}; unload it first, or send load_inplace", "lora_name") from None
        except BusyError as error:
            raise too_many_downloads(error) from None
        except TidewheelError as error:
            raise bad_request(f"the adapter cannot be loaded: {error}", "lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter {quoted(body.lora_name)} added successfully.")

    @operation(
        "Unload a LoRA adapter",
        UnloadLoraRequest,
        str,
        media_type="text/plain",
        example={"lora_name": "poems"},
        waits=False,
        administers=True,
    )
    async def _unload(self, request: Request) -> Response:
        require_administrator()
        body = self._decode_unload(await whole_body(request))
        try:
            if self._shared is None:
                self._loras.remove(body.lora_name)
            else:
                await self._shared.remove(body.lora_name)
        except UnknownLoraError as error:
            raise ApiError(HTTPStatus.NOT_FOUND, f"{error}; /v1/models lists them", param="lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter {quoted(body.lora_name)} removed successfully.")


def adapter_routes(
    loras: LoraRegistry | None, models: ServedModels, shared: SharedAdapters | None, *, notes: ParameterNotes
) -> list[Route]:
    """The endpoints. Where there are no adapters, or they must not be changed, every request is refused."""
    if loras is not None and loras.allows_updates:
        return AdapterEndpoints(loras, models, shared, notes=notes).routes()
    return [Route(path, _refuse, methods=["POST"]) for path in (_LOAD_PATH, _UNLOAD_PATH)]


@operation(
    "Load or unload a LoRA adapter: refused, because this server was started without permission for it",
    administers=True,
)
async def _refuse(request: Request) -> Response:
    raise ApiError(
        HTTPStatus.FORBIDDEN,
        "this server loads no adapters on request: start it with --enable-lora and --allow-runtime-lora-updating (or "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
    )
