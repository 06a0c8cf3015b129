"""What the server measures of its embedding models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.histogram import Histogram
from tidewheel.engine.outputs import FinishReason

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds


class EncoderMetrics:
    """Counters of requests, and the encoder engine's own counters, which are read at each scrape."""

    def __init__(self, engine: EncoderEngine, prefix: str) -> None:
        self._engine = engine
        self._prefix = prefix + "encoder_"
        self._finished: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[str] = Counter()
        self._latency: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_LATENCY_BUCKETS))

    def observe(self, model_name: str, finished_reason: str, seconds: float) -> None:
        """Count a request that has ended."""
        self._finished[model_name, finished_reason] += 1
        self._latency[model_name].observe(seconds)

    def reject(self, model_name: str) -> None:
        """Count a request that got a 429."""
        self._rejected[model_name] += 1

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = self._engine.stats()
        if not stats:
            return
        labels = ["model_name"]
        waiting = GaugeMetricFamily(self._prefix + "inputs_waiting", "Texts and pairs in the queue.", labels=labels)
        for name, figures in stats.items():
            waiting.add_metric([name], figures.inputs_waiting)
        yield waiting
        for metric, help_text, field in (
            ("batches", "Batches computed.", "batches_total"),
            ("tokens", "Tokens computed.", "tokens_total"),
            ("padding_tokens", "Tokens of padding computed beside them.", "padding_total"),
        ):
            counter = CounterMetricFamily(self._prefix + metric, help_text, labels=labels)
            for name, figures in stats.items():
                counter.add_metric([name], getattr(figures, field))
            yield counter
        requests = CounterMetricFamily(
            self._prefix + "requests", "Requests that ended.", labels=[*labels, "finished_reason"]
        )
        rejected = CounterMetricFamily(
            self._prefix + "requests_rejected", "Requests rejected because too many were waiting.", labels=labels
        )
        latency = HistogramMetricFamily(
            self._prefix + "request_latency_seconds",
            "From tokens to vectors or scores, waiting included.",
            labels=labels,
        )
        for name in stats:
            for reason in (FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR):
                requests.add_metric([name, reason.value], self._finished[name, reason.value])
            rejected.add_metric([name], self._rejected[name])
            latency.add_metric([name], self._latency[name].buckets(), self._latency[name].sum)
        yield requests
        yield rejected
        yield latency
