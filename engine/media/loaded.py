"""LoadedVision: what an engine needs to take images."""

from __future__ import annotations

from dataclasses import dataclass

from ..devices.tower import TowerExecutor
from .reader import MediaReader
from .vision import Vision


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """How the model sees images, its tower's weights, and what reads images; `max_bytes` of embeddings are kept."""

    vision: Vision
    tower: TowerExecutor
    reader: MediaReader
    max_bytes: int
