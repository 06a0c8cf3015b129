"""What the server measures of the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidewheel.engine.pipeline.stage_times import PipelineStats


def stage_metrics(stats: PipelineStats, prefix: str, model_name: str) -> Iterator[Metric]:
    """Counters by stage, counted from 1. Their rates give seconds a step, the share of computing, and seconds a hop."""
    from prometheus_client.core import CounterMetricFamily

    for name, help_text, field in (
        ("pipeline_stage_steps", "Steps that a stage has computed.", "steps"),
        ("pipeline_stage_computing_seconds", "Time that a stage has computed them.", "computing_s"),
        ("pipeline_stage_hops", "Hops from a stage to the next process whose time is known.", "hops"),
        ("pipeline_stage_hop_seconds", "Time of these hops.", "hop_s"),
    ):
        counter = CounterMetricFamily(prefix + name, help_text, labels=["model_name", "stage"])
        for index, stage in enumerate(stats.stages):
            counter.add_metric([model_name, str(index + 1)], getattr(stage, field))
        yield counter
    restarts = CounterMetricFamily(
        prefix + "pipeline_restarts", "Restarts of all stages because one had ended.", labels=["model_name"]
    )
    restarts.add_metric([model_name], stats.restarts)
    yield restarts
