"""What a server of several models measures of loading them, with scripted ones in virtual time."""

from __future__ import annotations

import asyncio

from engine.hosting.scripted_units import Machine, ScriptedUnit
from engine.hosting.virtual_time import run
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tidewheel.engine.errors import ModelError
from tidewheel.engine.hosting.budget import MemoryBudget
from tidewheel.engine.hosting.host import ModelHost
from tidewheel.server.telemetry.host_metrics import HostMetrics

NAMES = (
    "model_memory_bytes",
    "model_requests_waiting",
    "model_load_failed",
    "memory_used_bytes",
    "memory_budget_bytes",
)


def scrape(metrics: HostMetrics) -> dict[tuple[str, ...], float]:
    """The samples, by their names without the prefix and the values of their labels."""
    registry = CollectorRegistry()
    registry.register(metrics)
    families = [*text_string_to_metric_families(generate_latest(registry).decode())]
    assert {family.name for family in families} <= {f"x:{name}" for name in NAMES}
    return {
        (sample.name.removeprefix("x:"), *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_memory_waiting_requests_and_failures_are_measured_by_model() -> None:
    async def main() -> None:
        machine = Machine(10)
        broken = ScriptedUnit("broken", machine, faults=[lambda: ModelError("the file ends early")])
        units = [ScriptedUnit("a", machine, size=3), ScriptedUnit("b", machine, size=4), broken]
        budget = MemoryBudget(10)
        host = ModelHost(units, budget, clock=asyncio.get_running_loop().time)
        metrics = HostMetrics(host, budget, "x:")
        empty = {("memory_used_bytes",): 0, ("memory_budget_bytes",): 10}
        assert scrape(metrics) == empty
        await host.load("a")
        loading = [asyncio.create_task(host.load("b")) for _ in range(3)]
        await asyncio.sleep(1)
        of_a = {("model_memory_bytes", "a", "weights"): 3, ("model_memory_bytes", "a", "kv_cache"): 0}
        assert scrape(metrics) == {
            **empty,
            **of_a,
            ("model_requests_waiting", "a"): 0,
            ("model_requests_waiting", "b"): 3,
            ("memory_used_bytes",): 7,
        }
        await asyncio.gather(*loading)
        assert scrape(metrics)["model_memory_bytes", "b", "weights"] == 4
        await asyncio.gather(host.unload("b"), host.load("broken"), return_exceptions=True)
        assert scrape(metrics) == {
            **empty,
            **of_a,
            ("model_requests_waiting", "a"): 0,
            ("model_requests_waiting", "broken"): 0,
            ("model_load_failed", "broken"): 1,
            ("memory_used_bytes",): 3,
        }
        await host.stop()

    run(main())
