"""The layers of a stage, loaded in the process that computes them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ...devices import get_device
from ...models.spec import stage_tensors
from ...pipeline.draft import DraftPlan
from ...pipeline.runner import LoadedLayers
from ...pipeline.stage_plan import StagePlan
from ..load_progress import ReportedWeights
from ..opened_model import open_model
from .stage_weights import StageWeights

if TYPE_CHECKING:
    from ...devices.cpu.device import CpuDevice
    from ...devices.cpu.executor import CpuExecutor
    from ..load_progress import LoadProgress


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings that the parent process has logged already."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def groups_of_stage(plan: StagePlan, cpus: Sequence[int]) -> list[list[int]]:
    """A stage's processors in the groups that the options ask for. Raises DeviceError for too few processors."""
    with _without_warnings():
        device = get_device(plan.options.device, plan.options.device_options)
    return cast("CpuDevice", device).groups_of(cpus)


def load_stage(plan: StagePlan, groups: Sequence[Sequence[int]], report: Callable[[float], None]) -> LoadedLayers:
    """Load a stage's weights, to compute on these groups of processors.

    `report(fraction)` hears how much of the whole model was read. Raises DeviceError and ModelError.
    """
    with _without_warnings():
        model = open_model(plan.options)
    device = cast("CpuDevice", model.device).bound_to(groups)
    weights = StageWeights(model.weights, stage_tensors(model.spec, plan.stage))
    reported = ReportedWeights(weights, model.spec, cast("LoadProgress", _Reports(report)))
    executor = device.load_stage(model.spec, reported, plan.executor_options, plan.stage)
    return LoadedLayers(executor, None if plan.draft is None else _load_draft(plan.draft, executor))


def _load_draft(plan: DraftPlan, beside: CpuExecutor) -> CpuExecutor:
    with _without_warnings():
        model = open_model(plan.options)
    return cast("CpuDevice", model.device).load_draft(model.spec, model.weights, plan.executor_options, beside)


class _Reports:
    """Takes the place of a LoadProgress."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self.report = report
