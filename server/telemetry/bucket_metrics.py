"""What the server measures of a device that pads its launches to buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidewheel.engine.devices.bucket_stats import BucketStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def bucket_metrics(stats: BucketStats, prefix: str, model_name: str) -> Iterator[Metric]:
    """Counters of launches: by bucket, outside of all of them, and what was compiled while people waited."""
    from prometheus_client.core import CounterMetricFamily

    labels, values = ["model_name"], [model_name]
    by_bucket = [*labels, "phase", "batch_size", "query_len", "num_blocks"]
    hits = CounterMetricFamily(prefix + "bucket_hits", "Launches of a bucket.", labels=by_bucket)
    tokens = CounterMetricFamily(prefix + "bucket_tokens", "Tokens of its launches.", labels=by_bucket)
    padding = CounterMetricFamily(
        prefix + "bucket_padding_tokens", "Tokens of padding computed beside them.", labels=by_bucket
    )
    for use in stats.uses:
        of_use = [*values, use.phase, *map(str, use.bucket)]
        hits.add_metric(of_use, use.num_launches)
        tokens.add_metric(of_use, use.num_tokens)
        padding.add_metric(of_use, use.num_padded_tokens - use.num_tokens)
    yield from (hits, tokens, padding)
    for name, help_text, value in (
        ("bucket_misses", "Launches larger than every bucket.", stats.num_outside),
        ("compilations_after_warmup", "Compilations during serving.", stats.num_compilations),
    ):
        counter = CounterMetricFamily(prefix + name, help_text, labels=labels)
        counter.add_metric(values, value)
        yield counter
