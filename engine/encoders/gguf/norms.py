"""Norms whose weights files hold whole, where checkpoints hold what they are above 1."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from ...models.spec import NormSpec
from ..model import EncoderModel


def with_whole_norms(model: EncoderModel) -> EncoderModel:
    """The same model with norms that hold their weights whole."""
    return replace(
        model,
        tower=_whole(model.tower),
        final_norm=_whole(model.final_norm),
        embedding=_whole(model.embedding),
    )


def _whole(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return tuple(map(_whole, spec))
    if isinstance(spec, NormSpec):
        return replace(spec, unit_offset=False)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    return replace(spec, **{field.name: _whole(getattr(spec, field.name)) for field in dataclasses.fields(spec)})
