"""What the server measures, as Prometheus text under the names that vLLM's dashboards use, prefixed `tidewheel:`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidewheel.engine.engine import Engine
from tidewheel.engine.histogram import Histogram
from tidewheel.engine.request import FinishReason, RequestOutput

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Seconds.
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

METRICS_PREFIX = "tidewheel:"


class ServerMetrics:
    """The server's instruments, and the engine's counters read at each scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self.time_to_first_token = Histogram(_TTFT_BUCKETS)
        self.inter_token_latency = Histogram(_ITL_BUCKETS)
        self.request_latency = Histogram(_E2E_BUCKETS)
        self.finished: Counter[str] = Counter()

    def start_timer(self) -> RequestTimer:
        """A timer for a request that arrives now."""
        return RequestTimer(self)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = self._engine.stats()
        labels, values = ["model_name"], [self._model_name]
        kv_usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        for name, help_text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting for their first step.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 1 is all of it.", kv_usage),
        ):
            gauge = GaugeMetricFamily(METRICS_PREFIX + name, help_text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens of all requests.", stats.prompt_tokens_total),
            ("generation_tokens", "Generated tokens of all requests.", stats.generation_tokens_total),
            ("num_preemptions", "Sequences put back to be recomputed.", stats.preemptions_total),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens_total),
        ):
            counter = CounterMetricFamily(METRICS_PREFIX + name, help_text, labels=labels)
            counter.add_metric(values, value)
            yield counter
        success = CounterMetricFamily(
            METRICS_PREFIX + "request_success", "Finished choices.", labels=[*labels, "finished_reason"]
        )
        for reason in FinishReason:
            success.add_metric([*values, reason.value], self.finished[reason.value])
        yield success
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between a choice's tokens.", self.inter_token_latency),
            ("e2e_request_latency_seconds", "From a request's arrival to its end.", self.request_latency),
        ):
            family = HistogramMetricFamily(METRICS_PREFIX + name, help_text, labels=labels)
            family.add_metric(values, histogram.buckets(), histogram.sum)
            yield family


class RequestTimer:
    """Follows one request's outputs: what it took and how it ended."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self.started = time.perf_counter()
        self.time_to_first_token: float | None = None
        self._last_token: dict[int, float] = {}  # by choice
        self.finish_reasons: list[str] = []

    def on_output(self, output: RequestOutput, choice: int) -> None:
        """Takes note of one output of a choice (counted over prompts, then over n)."""
        if output.token_ids:
            now = time.perf_counter()
            if self.time_to_first_token is None:
                self.time_to_first_token = now - self.started
                self._metrics.time_to_first_token.observe(self.time_to_first_token)
            last = self._last_token.get(choice)
            if last is not None:
                self._metrics.inter_token_latency.observe(now - last)
            self._last_token[choice] = now
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason.value)
            self._metrics.finished[output.finish_reason.value] += 1

    def stop(self) -> float:
        """Ends the request; returns how many seconds it took."""
        elapsed = time.perf_counter() - self.started
        self._metrics.request_latency.observe(elapsed)
        return elapsed
