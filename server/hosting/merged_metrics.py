"""MergedMetrics: the metrics of all loaded models as one collector; `model_name` tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .hosted_models import HostedModels

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class MergedMetrics:
    """See prometheus_client's collector protocol. Each family is there once, with the samples of all models."""

    def __init__(self, models: HostedModels, *, named: bool) -> None:
        """`named`: those alone whose names clients gave."""
        self._models = models
        self._named = named

    def collect(self) -> Iterator[Metric]:
        """The families."""
        families: dict[str, Metric] = {}
        for loaded in self._models.loaded:
            for model in loaded.models.values():
                for collector in model.named_collectors if self._named else model.collectors:
                    for family in collector.collect():
                        known = families.setdefault(family.name, family)
                        if known is not family:
                            known.samples += family.samples
        yield from families.values()
