"""HostBatches: batches of a server of several models, whose requests each name one."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from ..api.batches import Batches
from ..batches.rows import error_of
from ..http.api_keys import Tenant
from ..http.json_limits import MIN_VALUES
from ..protocol.decode import ParameterNotes
from .hosted_models import HostedModels


class HostBatches(Batches):
    """See Batches. A model that fails fails its own requests, and does not end the batch."""

    def __init__(
        self,
        models: HostedModels,
        folder: str,
        batch_rows: int,
        notes: ParameterNotes,
        tenant_of: Callable[[str], Tenant],
    ) -> None:
        super().__init__(folder, batch_rows, MIN_VALUES, notes, tenant_of)
        self._models = models

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        status, content = await super()._post(path, body)
        ends_here = status == HTTPStatus.SERVICE_UNAVAILABLE and not self._models.is_draining
        if ends_here and error_of(content).code == "engine_unavailable":  # it is loaded anew for the next request
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        return status, content
