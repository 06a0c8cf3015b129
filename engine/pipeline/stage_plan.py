"""StagePlan: a stage of a pipeline, and how to load it."""

from __future__ import annotations

from msgspec import Struct

from ..devices.limits import ExecutorOptions
from ..models.spec import StageSpec
from ..options import EngineOptions
from .draft import DraftPlan
from .step_slot import SlotShape


class StagePlan(Struct, frozen=True):
    """A stage and how to load it: with the options of the whole model, whose limits each stage has.

    The first stage has a `draft` model beside it, if there is one.
    """

    options: EngineOptions
    executor_options: ExecutorOptions
    stage: StageSpec
    index: int
    shape: SlotShape
    draft: DraftPlan | None = None
