"""What a server of several models measures of loading them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidewheel.engine.hosting.budget import MemoryBudget
from tidewheel.engine.hosting.host import ModelHost
from tidewheel.engine.hosting.units import State

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_HOLDING = (State.LOADED, State.UNLOADING)


class HostMetrics:
    """Which models are loaded, the memory that they take, and who waits for them.

    Models that are loaded together have the name of the first of them. Those that are not loaded, and that nobody waits
    for, are left out: there may be thousands. The names begin with `prefix`.
    """

    def __init__(self, host: ModelHost, budget: MemoryBudget, prefix: str) -> None:
        self._host = host
        self._budget = budget
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        from prometheus_client.core import GaugeMetricFamily

        def gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(self._prefix + name, help_text, labels=labels)

        memory = gauge("model_memory_bytes", "Memory of loaded models, by its use.", "model_name", "kind")
        waiting = gauge("model_requests_waiting", "Requests that wait for a model to be loaded.", "model_name")
        failed = gauge("model_load_failed", "1 for models that could not be loaded last time.", "model_name")
        for unit in self._host.snapshot():
            if unit.state in _HOLDING and unit.needs is not None:
                memory.add_metric([unit.name, "weights"], unit.needs.weight_bytes)
                memory.add_metric([unit.name, "kv_cache"], unit.needs.cache_bytes)
            if unit.state is not State.UNLOADED or unit.waiting:
                waiting.add_metric([unit.name], unit.waiting)
            if unit.state is State.FAILED:
                failed.add_metric([unit.name], 1)
        yield from (memory, waiting, failed)
        used = gauge("memory_used_bytes", "Memory that models take, with those that are being loaded.")
        used.add_metric([], self._budget.used_bytes)
        yield used
        if self._budget.total_bytes is not None:
            total = gauge("memory_budget_bytes", "Memory that models may take together (--memory).")
            total.add_metric([], self._budget.total_bytes)
            yield total
