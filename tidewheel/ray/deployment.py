"""A replica: the server's application in an actor of Ray Serve, which speaks HTTP for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from tidewheel.server.batches.app_client import AppClient
from tidewheel.server.telemetry.logs import configure_logging

from .autoscaling import PREFILL_S, WAITING
from .cores import claim_cores
from .options import parse_arguments
from .prefixes import HeldPrefixes, model_key, packed_numbers
from .replica_app import ReplicaApp
from .replica_metrics import PATH, ReplicaMetrics, ReplicaText
from .replica_models import models_of
from .router import HELD, MODELS
from .shared_state import without_own_state


@serve.ingress()
class TidewheelServer:
    """One replica. Serve builds its application, and asks for its health and for what its router needs.

    `arguments` and `environment` are for `tidewheel serve`. The replica claims `num_cpus` cores (None: no cores), and
    its relative paths begin at `folder`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        num_cpus: int | None,
        is_several: bool,
        folder: str | None,
    ) -> None:
        if folder is not None:
            os.chdir(folder)
        if num_cpus is not None:
            self._cores = claim_cores(num_cpus)  # until this process ends
            self._cores.bind()
        options = parse_arguments(arguments, {**os.environ, **environment})
        self._options = without_own_state(options) if is_several else options
        self._is_several = is_several
        self._held = HeldPrefixes()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, with its model loaded, unless it has several."""
        options = self._options
        configure_logging(options.log.log_level, options.log.log_format)
        self._models = models_of(options)
        app = self._models.app
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._client = AppClient(app.router)  # without the check of API keys
        metrics = ReplicaMetrics(
            lambda: serve.get_deployment_handle(context.deployment, context.app_name),
            self.metrics.__name__,
            options.app.metrics_prefix,
        )
        return ReplicaApp(app, self._name, self._held, metrics, is_several=self._is_several)

    async def metrics(self) -> ReplicaText:
        """This replica's metrics for Prometheus; any replica may ask for them. Raises RuntimeError if it has none."""
        status, text = await self._client.get(PATH)
        if status != HTTPStatus.OK:
            raise RuntimeError(f"{PATH} of the replica {self._name} is answered with {status}")
        return self._name, text.decode()

    def check_health(self) -> None:
        """Raises RuntimeError if an engine has failed. Serve then starts another replica instead of this one."""
        if (failure := self._models.failure) is not None:
            raise RuntimeError(f"the engine has failed: {failure}")
        self._models.warm_up()

    def record_routing_stats(self) -> dict[str, Any]:
        """The prefixes that this replica computed last, and the adapters and models in its memory."""
        registries = [engine.loras for engine in self._models.engines if engine.loras is not None]
        held = {HELD: self._held.packed(model_key(name) for loras in registries for name in loras.in_memory)}
        loaded = self._models.loaded
        return held if loaded is None else {**held, MODELS: packed_numbers({*loaded})}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What autoscaling.WaitPolicy asks for; no seconds as long as no engine knows more of its device."""
        left_s = [left_s for engine in self._models.engines if (left_s := engine.prompts_left_s()) is not None]
        return {WAITING: float(self._models.num_waiting), **({PREFILL_S: sum(left_s)} if left_s else {})}
