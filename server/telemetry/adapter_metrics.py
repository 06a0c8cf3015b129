"""What the server tells of LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidewheel.engine.core.engine import Engine

if TYPE_CHECKING:
    from prometheus_client.core import Metric

ADAPTERS = "lora_requests_info"
"""The metric that has names of adapters, behind the prefix."""


class AdapterMetrics:
    """The names of the adapters in use as labels, whose value is the time in seconds since 1970: so vLLM has it, and
    gateways that send requests to replicas by adapter read it.
    """

    def __init__(self, engine: Engine, model_name: str, prefix: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._name = prefix + ADAPTERS

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        if self._engine.loras is None or (use := self._engine.adapters_used()) is None:
            return
        from prometheus_client.core import GaugeMetricFamily

        labels = {
            "model_name": self._model_name,
            "max_lora": str(self._engine.loras.max_loras),
            "running_lora_adapters": ",".join(use.running),
            "waiting_lora_adapters": ",".join(use.waiting),
        }
        info = GaugeMetricFamily(self._name, "The adapters in use, in labels.", labels=[*labels])
        info.add_metric([*labels.values()], time.time())
        yield info
