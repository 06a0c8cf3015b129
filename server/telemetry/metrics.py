"""The server's metrics as Prometheus text, with the names that vLLM's dashboards use.

The names begin with `tidewheel:`, or with the value of `--metrics-prefix`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tidewheel.engine.core.engine import Engine, EngineStats
from tidewheel.engine.core.output_processor import OutputProcessor
from tidewheel.engine.histogram import Histogram
from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.sampling_params import SamplingParams

from .bucket_metrics import bucket_metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Seconds.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_N_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

OF_REQUESTS = frozenset(
    "requests_rejected decode_seconds request_success time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds request_prompt_tokens "
    "request_prefill_kv_computed_tokens request_generation_tokens request_max_num_generation_tokens "
    "request_num_preemptions request_params_max_tokens request_params_n".split()
)
"""The metrics of requests; the others are of the engine. Names that share an engine have these each."""


class ServerMetrics:
    """The server's own metrics, and the engine's counters, which are read at each scrape."""

    def __init__(self, engine: Engine, model_name: str, prefix: str) -> None:
        self.prefix = prefix
        self._engine = engine
        self._model_name = model_name
        tokens = _token_buckets(engine.max_model_len)
        self.time_to_first_token = Histogram(_TTFT_BUCKETS)
        self.inter_token_latency = Histogram(_ITL_BUCKETS)
        self.decode_clock = DecodeClock()
        self.time_per_output_token = Histogram(_ITL_BUCKETS)
        self.request_latency = Histogram(_E2E_BUCKETS)
        self.queue_time = Histogram(_E2E_BUCKETS)
        self.prefill_time = Histogram(_E2E_BUCKETS)
        self.decode_time = Histogram(_E2E_BUCKETS)
        self.inference_time = Histogram(_E2E_BUCKETS)
        self.prompt_tokens = Histogram(tokens)
        self.prefill_computed_tokens = Histogram(tokens)
        self.generation_tokens = Histogram(tokens)
        self.max_generation_tokens = Histogram(tokens)
        self.params_max_tokens = Histogram(tokens)
        self.params_n = Histogram(_N_BUCKETS)
        self.preemptions = Histogram(_PREEMPTION_BUCKETS)
        self.finished: Counter[str] = Counter()
        self.rejected = 0

    def start_timer(self) -> RequestTimer:
        """A timer for a request that arrives now."""
        return RequestTimer(self)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = self._engine.stats()
        labels, values = ["model_name"], [self._model_name]
        for name, help_text, value in self._gauges(stats):
            gauge = GaugeMetricFamily(self.prefix + name, help_text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        by_reason = GaugeMetricFamily(
            self.prefix + "num_requests_waiting_by_reason",
            "Requests that wait for room (capacity), or for a prefix that is being computed or read (deferred).",
            labels=[*labels, "reason"],
        )
        by_reason.add_metric([*values, "capacity"], stats.num_waiting - stats.num_deferred)
        by_reason.add_metric([*values, "deferred"], stats.num_deferred)
        yield by_reason
        config = self._cache_config()
        info = GaugeMetricFamily(
            self.prefix + "cache_config_info", "The KV cache, in labels.", labels=[*labels, *config]
        )
        info.add_metric([*values, *config.values()], 1)
        yield info
        for name, help_text, value in self._counters(stats):
            counter = CounterMetricFamily(self.prefix + name, help_text, labels=labels)
            counter.add_metric(values, value)
            yield counter
        if stats.drafts is not None:
            by_place = CounterMetricFamily(
                self.prefix + "spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens, by their position in the draft.",
                labels=[*labels, "position"],
            )
            for place, count in enumerate(stats.drafts.accepted_at):
                by_place.add_metric([*values, str(place)], count)
            yield by_place
        success = CounterMetricFamily(
            self.prefix + "request_success", "Finished choices.", labels=[*labels, "finished_reason"]
        )
        for reason in FinishReason:
            success.add_metric([*values, reason.value], self.finished[reason.value])
        yield success
        for name, help_text, histogram in self._histograms(stats):
            family = HistogramMetricFamily(self.prefix + name, help_text, labels=labels)
            family.add_metric(values, histogram.buckets(), histogram.sum)
            yield family
        if stats.offload is not None:
            from .offload_metrics import offload_metrics

            yield from offload_metrics(stats.offload, self.prefix, self._model_name)
        if stats.pipeline is not None:
            from .stage_metrics import stage_metrics

            yield from stage_metrics(stats.pipeline, self.prefix, self._model_name)
        if (bucket_stats := self._engine.bucket_stats()) is not None:
            yield from bucket_metrics(bucket_stats, self.prefix, self._model_name)

    @staticmethod
    def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
        kv_usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        return [
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting for their first step.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 1 is all of it.", kv_usage),
        ]

    def _cache_config(self) -> Mapping[str, str]:
        limits, info = self._engine.limits, self._engine.info
        return {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.num_blocks),  # the name that dashboards know, for any device
            "cache_dtype": info.get("kv_cache_dtype", ""),
            "enable_prefix_caching": info.get("enable_prefix_caching", ""),
        }

    def _counters(self, stats: EngineStats) -> list[tuple[str, str, float]]:
        drafts = stats.drafts
        drafted = (
            []
            if drafts is None
            else [
                ("spec_decode_num_drafts", "Drafts of upcoming tokens.", drafts.drafts_total),
                ("spec_decode_num_draft_tokens", "Draft tokens in these drafts.", drafts.draft_tokens_total),
                ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", drafts.accepted_total),
            ]
        )
        return [
            *drafted,
            ("prompt_tokens", "Prompt tokens of all requests.", stats.prompt_tokens_total),
            ("generation_tokens", "Generated tokens of all requests.", stats.generation_tokens_total),
            ("num_preemptions", "Sequences put back to be recomputed.", stats.preemptions_total),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens_total),
            ("steps_stalled", "Steps that took longer than --step-timeout.", stats.stalled_steps_total),
            ("requests_rejected", "Requests rejected because too many were waiting.", self.rejected),
            (
                "decode_seconds",
                "Seconds in which a choice was between its first token and its last.",
                self.decode_clock.seconds,
            ),
        ]

    def _histograms(self, stats: EngineStats) -> list[tuple[str, str, Histogram]]:
        return [
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between a choice's tokens.", self.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "A choice's mean time between tokens.",
                self.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From a request's arrival to its end.", self.request_latency),
            ("request_queue_time_seconds", "From a choice's arrival to its first step.", self.queue_time),
            ("request_prefill_time_seconds", "From a choice's first step to its first token.", self.prefill_time),
            ("request_decode_time_seconds", "From a choice's first token to its last.", self.decode_time),
            ("request_inference_time_seconds", "From a choice's first step to its last token.", self.inference_time),
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_tokens),
            (
                "request_prefill_kv_computed_tokens",
                "Tokens of a prompt that were not found in the cache.",
                self.prefill_computed_tokens,
            ),
            ("request_generation_tokens", "Generated tokens of a choice.", self.generation_tokens),
            (
                "request_max_num_generation_tokens",
                "Generated tokens of a prompt's longest choice.",
                self.max_generation_tokens,
            ),
            ("request_num_preemptions", "How often a choice was put back to be recomputed.", self.preemptions),
            ("request_params_max_tokens", "Requests' max_tokens.", self.params_max_tokens),
            ("request_params_n", "Requests' n.", self.params_n),
            ("iteration_tokens_total", "Tokens in a step.", stats.step_tokens),
            ("step_duration_seconds", "How long a step took.", stats.step_seconds),
        ]


class DecodeClock:
    """The time in which at least one choice is between its first token and its last, as far as tokens have come.

    All tokens except first ones, divided by this time, are the server's speed while it decodes. If a choice is alone,
    that is its own speed.
    """

    __slots__ = ("_mark", "_num_decoding", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_decoding = 0
        self._mark = 0.0

    def begin(self, first_token: float) -> None:
        """A choice had its first token at that time."""
        if not self._num_decoding:
            self._mark = max(self._mark, first_token)
        self._num_decoding += 1

    def tick(self, now: float) -> None:
        """A choice that has begun has a token."""
        if now > self._mark:
            self.seconds += now - self._mark
            self._mark = now

    def end(self, num_choices: int = 1) -> None:
        """`num_choices` choices have no more tokens."""
        self._num_decoding -= num_choices


class RequestTimer:
    """Follows one request's outputs: what it took and how it ended."""

    __slots__ = (
        "_last_token",
        "_metrics",
        "_num_decoding",
        "completion_tokens",
        "finish_reasons",
        "started",
        "time_to_first_token",
    )

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self.started = time.perf_counter()
        self.completion_tokens = 0  # of all choices, as far as they have been delivered
        self.time_to_first_token: float | None = None
        self._last_token: dict[int, float] = {}  # by choice
        self._num_decoding = 0
        self.finish_reasons: list[str] = []

    def on_output(self, output: RequestOutput, choice: OutputProcessor) -> None:
        """Note an output of a choice, whose index counts over all prompts.

        Several tokens that come at once took equal parts of the time since the last.
        """
        count = len(output.token_ids)
        if count:
            self.completion_tokens += count
            now, index = time.perf_counter(), output.index
            last = self._last_token.get(index)
            self._last_token[index] = now
            if last is None:
                if self.time_to_first_token is None:
                    self.time_to_first_token = now - self.started
                    self._metrics.time_to_first_token.observe(self.time_to_first_token)
                # The time to the first token is no latency between tokens.
                last, count = now if choice.times is None else choice.times.first_token, count - 1
                self._metrics.decode_clock.begin(last if count else now)
                self._num_decoding += 1
            if count:
                self._metrics.decode_clock.tick(now)
            if count == 1:
                self._metrics.inter_token_latency.observe(now - last)
            elif count:
                self._metrics.inter_token_latency.observe_many((now - last) / count, count)
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason.value)
            self._metrics.finished[output.finish_reason.value] += 1
            if output.index in self._last_token:
                self._metrics.decode_clock.end()
                self._num_decoding -= 1

    def decode_time(self, choice: OutputProcessor) -> float | None:
        """Seconds from a choice's first token to its last; None without tokens."""
        last = self._last_token.get(choice.index)
        return None if last is None or choice.times is None else max(last - choice.times.first_token, 0.0)

    def stop(
        self, prompt_lengths: Sequence[int], sampling: SamplingParams, choices: Sequence[Sequence[OutputProcessor]]
    ) -> float:
        """End the request and return how many seconds it took. `choices` has each prompt's choices."""
        elapsed = time.perf_counter() - self.started
        metrics = self._metrics
        metrics.decode_clock.end(self._num_decoding)  # of choices whose end was not reported
        self._num_decoding = 0
        metrics.request_latency.observe(elapsed)
        metrics.params_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            metrics.params_max_tokens.observe(sampling.max_tokens)
        for length, answers in zip(prompt_lengths, choices, strict=True):
            metrics.prompt_tokens.observe(length)
            metrics.prefill_computed_tokens.observe(length - answers[0].num_cached_tokens)
            metrics.max_generation_tokens.observe(max(answer.num_tokens for answer in answers))
            for answer in answers:
                self._observe(answer, self.decode_time(answer))
        return elapsed

    def _observe(self, choice: OutputProcessor, decode: float | None) -> None:
        metrics = self._metrics
        metrics.generation_tokens.observe(choice.num_tokens)
        metrics.preemptions.observe(choice.num_preemptions)
        if choice.times is None or decode is None:
            return
        prefill = choice.times.first_token - choice.times.scheduled
        metrics.queue_time.observe(choice.times.scheduled - choice.times.queued)
        metrics.prefill_time.observe(prefill)
        metrics.decode_time.observe(decode)
        metrics.inference_time.observe(prefill + decode)
        if choice.num_tokens > 1:
            metrics.time_per_output_token.observe(decode / (choice.num_tokens - 1))


def _token_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to `largest`."""
    bounds: list[int] = []
    power = 1
    while power <= largest:
        bounds += [power * digit for digit in (1, 2, 5) if power * digit <= largest]
        power *= 10
    return tuple(bounds)
