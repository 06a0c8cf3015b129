"""MergedMetrics: the metrics of all loaded models as one collector; `model_name` tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..telemetry.metrics import OF_REQUESTS
from .hosted_models import HostedModels
from .unit import LoadedModel

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class MergedMetrics:
    """See prometheus_client's collector protocol. Each family is there once, with the samples of all models."""

    def __init__(self, models: HostedModels, prefix: str, *, named: bool) -> None:
        """`named`: those alone whose names clients gave."""
        self._models = models
        self._prefix = prefix
        self._named = named

    def collect(self) -> Iterator[Metric]:
        """The families."""
        families: dict[str, Metric] = {}
        for loaded in self._models.loaded:
            for family in self._families(loaded):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()

    def _families(self, loaded: LoadedModel) -> Iterator[Metric]:
        """What the engine has done counts once, under the first name that it has."""
        for index, model in enumerate(loaded.models.values()):
            for collector in model.named_collectors if self._named else model.collectors:
                for family in collector.collect():
                    if not index or family.name.removeprefix(self._prefix) in OF_REQUESTS:
                        yield family
