"""Adapters in a pipeline: each stage is given what an adapter changes in its own layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from ...models.spec import DecoderSpec, StageSpec, stage_has
from ...weights.lora import EMBED, HEAD, LoraAdapter


def parts_of(adapter: LoraAdapter, spec: DecoderSpec, stages: Sequence[StageSpec]) -> list[LoraAdapter]:
    """Each stage's part of an adapter. All parts have its changes to the rope."""
    return [_part(adapter, spec, stage) for stage in stages]


def _part(adapter: LoraAdapter, spec: DecoderSpec, stage: StageSpec) -> LoraAdapter:
    part = copy.copy(adapter)  # `replace` would hash what is in it again
    updates = tuple(update for update in adapter.updates if _has(spec, stage, update.name))
    matrices = {name: matrix for name, matrix in adapter.matrices.items() if _has(spec, stage, name)}
    object.__setattr__(part, "updates", updates)
    object.__setattr__(part, "matrices", matrices)
    return part


def _has(spec: DecoderSpec, stage: StageSpec, name: str) -> bool:
    if name == EMBED:  # where tokens are looked up, also for a layer for drafts
        return stage.is_first or (stage.is_last and spec.mtp is not None)
    return stage.is_last if name == HEAD else stage_has(spec, stage, f"{name}.weight")
