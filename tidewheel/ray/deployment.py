"""A replica: the server's application in an actor of Ray Serve, which speaks HTTP for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.loading.load import EngineLoad
from tidewheel.server.app_resources import find_resources
from tidewheel.server.batches.app_client import AppClient
from tidewheel.server.commands.serve import load_encoders_of
from tidewheel.server.service import build_engine_and_app
from tidewheel.server.telemetry.logs import configure_logging

from .autoscaling import PREFILL_S, WAITING
from .cores import claim_cores
from .options import parse_arguments
from .prefixes import HeldPrefixes, model_key
from .replica_app import ReplicaApp
from .replica_metrics import PATH, ReplicaMetrics, ReplicaText
from .router import HELD
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
        """The application, with its model loaded."""
        options = self._options
        configure_logging(options.log.log_level, options.log.log_format)
        resources = find_resources(options.app)
        self._encoders = load_encoders_of(options) or EncoderEngine()
        with EngineLoad(options.engine) as load:
            self._engine, app = build_engine_and_app(load, self._encoders, options, resources)
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
        for engine in (self._engine, self._encoders):
            if engine.failure is not None:
                raise RuntimeError(f"the engine has failed: {engine.failure}")
        self._engine.warm_up()

    def record_routing_stats(self) -> dict[str, Any]:
        """The prefixes that this replica computed last, and the adapters in its memory."""
        loras = self._engine.loras
        return {HELD: self._held.packed(model_key(name) for name in ([] if loras is None else loras.in_memory))}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What autoscaling.WaitPolicy asks for; no seconds as long as the engine knows little of its device."""
        left_s = self._engine.prompts_left_s()
        known = {} if left_s is None else {PREFILL_S: left_s}
        return {WAITING: float(self._engine.stats().num_waiting), **known}
