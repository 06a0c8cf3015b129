"""What the server tells of LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidewheel.engine.adapters.registry import LoraUse


def adapter_metrics(use: LoraUse, max_loras: int, prefix: str, model_name: str) -> Iterator[Metric]:
    """The names of the adapters in use as labels, whose value is the time in seconds since 1970: so vLLM has it, and
    gateways that send requests to replicas by adapter read it.
    """
    from prometheus_client.core import GaugeMetricFamily

    labels = {
        "model_name": model_name,
        "max_lora": str(max_loras),
        "running_lora_adapters": ",".join(use.running),
        "waiting_lora_adapters": ",".join(use.waiting),
    }
    info = GaugeMetricFamily(prefix + "lora_requests_info", "The adapters in use, in labels.", labels=[*labels])
    info.add_metric([*labels.values()], time.time())
    yield info
