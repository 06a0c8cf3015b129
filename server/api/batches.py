"""`/v1/batches`: files of requests that are answered when no other request waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.errors import quoted

from ..batches.app_client import AppClient
from ..batches.rows import URLS
from ..batches.runner import BatchRunner
from ..batches.store import BatchStore
from ..errors import bad_request, exception_handlers
from ..http.api_keys import Tenant, current_tenant
from ..openapi.document import operation
from ..protocol.batches import BatchObject, BatchRequest, Page
from ..protocol.decode import BodyDecoder, ParameterNotes
from .body import whole_body
from .files import FilesEndpoints
from .json_response import json_response

_MAX_METADATA = 16
_MAX_PAGE = 100
_LONGEST_NUMBER = 10  # digits; Python refuses to read thousands


class Batches:
    """The endpoints of files and batches in a folder, and the work on the batches.

    `max_num_seqs` requests of a batch run at a time, for the tenant that `tenant_of` makes of its owner. Each may have
    `max_values` values in its JSON. Raises TidewheelError for a folder that cannot be used.
    """

    def __init__(
        self,
        folder: str,
        max_num_seqs: int,
        max_values: int,
        notes: ParameterNotes,
        tenant_of: Callable[[str], Tenant],
    ) -> None:
        store = BatchStore(Path(folder))
        self._runner = BatchRunner(store, self._post, max_num_seqs, max_values, tenant_of)
        self._client: AppClient | None = None
        self.routes = [
            *FilesEndpoints(store).routes(),
            *BatchesEndpoints(store, self._runner, notes=notes).routes(),
        ]

    def start(self, app: Starlette) -> None:
        """Work on batches with the endpoints of `app`, without its middleware: no key is needed here."""
        self._client = AppClient(ExceptionMiddleware(app.router, handlers=exception_handlers()))
        self._runner.start()

    async def stop(self) -> None:
        """Leave the batches as they are: the next start goes on with them."""
        await self._runner.stop()

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        assert self._client is not None, "the application has started"
        return await self._client.post(path, body)


class BatchesEndpoints:
    """Starts, shows and cancels batches of files in a store."""

    def __init__(self, store: BatchStore, runner: BatchRunner, *, notes: ParameterNotes) -> None:
        self._store = store
        self._runner = runner
        self._decode = BodyDecoder(BatchRequest, notes=notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/batches", self._create, methods=["POST"]),
            Route("/v1/batches", self._list),
            Route("/v1/batches/{id}", self._retrieve),
            Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
        ]

    @operation("Answer a file of requests", BatchRequest, BatchObject, waits=False)
    async def _create(self, request: Request) -> Response:
        body = self._decode(await whole_body(request))
        if body.endpoint not in URLS:
            raise bad_request(f"endpoint must be {' or '.join(URLS)}, got {quoted(body.endpoint)}", "endpoint")
        metadata = body.metadata or {}
        if len(metadata) > _MAX_METADATA or any(len(key) > 64 or len(text) > 512 for key, text in metadata.items()):
            rule = f"at most {_MAX_METADATA} names of 64 characters, with texts of 512"
            raise bad_request(f"metadata must have {rule}", "metadata")
        await self._store.refresh()
        file = self._store.file(body.input_file_id)
        batch = await self._store.new_batch(body.endpoint, file.id, body.metadata, current_tenant().owner)
        self._runner.notify()
        return json_response(batch.without_owner())

    @operation("List the batches", response=Page[BatchObject])
    async def _list(self, request: Request) -> Response:
        await self._store.refresh()
        query, batches = request.query_params, self._store.batches
        limit = query.get("limit", "20")
        if not (limit.isdecimal() and len(limit) <= _LONGEST_NUMBER and 1 <= int(limit) <= _MAX_PAGE):
            raise bad_request(f"limit must be between 1 and {_MAX_PAGE}, got {quoted(limit)}", "limit")
        if after := query.get("after"):
            batches = batches[batches.index(self._store.batch(after)) + 1 :]
        shown = [batch.without_owner() for batch in batches[: int(limit)]]
        ids = (shown[0].id, shown[-1].id) if shown else (None, None)
        return json_response(Page(shown, len(batches) > len(shown), *ids))

    @operation("One batch", response=BatchObject)
    async def _retrieve(self, request: Request) -> Response:
        await self._store.refresh()
        return json_response(self._store.batch(request.path_params["id"]).without_owner())

    @operation("Cancel a batch; its answers so far are kept", response=BatchObject)
    async def _cancel(self, request: Request) -> Response:
        await self._store.refresh()
        await self._runner.cancel(self._store.batch(request.path_params["id"]))
        await self._store.refresh()
        return json_response(self._store.batch(request.path_params["id"]).without_owner())
