"""What the server measures of KV blocks that are kept on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidewheel.engine.cache.tiers.offload import OffloadStats


def offload_metrics(stats: OffloadStats, prefix: str, model_name: str) -> Iterator[Metric]:
    """Tokens that were looked for and found, blocks and bytes that went either way, and how full the disk space is."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels, values, tier = ["model_name"], [model_name], stats.tier
    for name, help_text, value in (
        ("external_prefix_cache_queries", "Prompt tokens looked up on disk.", stats.tokens_missed),
        ("external_prefix_cache_hits", "Prompt tokens that came from disk.", stats.tokens_found),
        ("kv_offload_blocks_written", "KV blocks written to disk.", tier.blocks_written),
        ("kv_offload_blocks_read", "KV blocks read from disk.", tier.blocks_read),
        ("kv_offload_blocks_bad", "KV blocks on disk that were damaged, and deleted.", tier.blocks_bad),
        ("kv_offload_blocks_dropped", "KV blocks not written because the disk was too slow.", tier.blocks_dropped),
    ):
        counter = CounterMetricFamily(prefix + name, help_text, labels=labels)
        counter.add_metric(values, value)
        yield counter
    moved = CounterMetricFamily(
        prefix + "kv_offload_total_bytes", "Bytes of KV blocks, by direction.", labels=[*labels, "transfer_type"]
    )
    moved.add_metric([*values, "CPU_to_disk"], tier.bytes_written)
    moved.add_metric([*values, "disk_to_CPU"], tier.bytes_read)
    yield moved
    for name, help_text, share in (
        ("kv_offload_usage_perc", "Share of --kv-offload-space in use, 1 is all of it.", tier.bytes_held / tier.space),
        ("kv_offload_on", "1; 0 after the disk has failed.", float(tier.is_on)),
    ):
        gauge = GaugeMetricFamily(prefix + name, help_text, labels=labels)
        gauge.add_metric(values, share)
        yield gauge
