"""From a model to its pipeline: what cannot be split is refused before weights are read, then the stages load."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...cancellation import Cancellation
from ...devices.base import Device
from ...devices.cpu.ceilings import compute_ceiling
from ...devices.limits import ExecutorLimits, ExecutorOptions
from ...errors import DeviceError
from ...machine.memory import Memory
from ...models.spec import StageSpec, stage_row_floats
from ...options import EngineOptions
from ...pipeline.draft import DraftPlan
from ...pipeline.executor import PipelineExecutor
from ...pipeline.speed import StageSpeed, slowness, stage_speeds
from ...pipeline.stage_plan import StagePlan
from ...pipeline.stages import StageHost
from ...pipeline.step_slot import SlotShape
from ..opened_model import OpenedModel
from .adapters import parts_of
from .local_stages import LocalHost
from .split import BESIDE_WEIGHTS, StageRoom, split_as_asked, split_layers, stage_bytes

if TYPE_CHECKING:
    from ..drafts import OpenedDraft

logger = logging.getLogger(__name__)

_FLOAT_BYTES = 4
_GIB = 2**30


def local_host(options: EngineOptions, model: OpenedModel) -> StageHost:
    """This machine, for the stages of a model. Raises DeviceError if the device has none."""
    return LocalHost(_staged(options, model), options.pipeline.stages)


def plan_stages(
    options: EngineOptions, model: OpenedModel, host: StageHost | None, beside_first: int = 0
) -> list[StageSpec]:
    """The stages of a model that has several, for the cores and the memory of a `host`.

    Without a host, all stages count as equal. Nothing is measured either if the options give the layers of each stage.
    `beside_first` is what a draft model takes on the first stage's machine, in bytes. Raises DeviceError and ModelError
    for what cannot be split.
    """
    _staged(options, model)
    count, spec, formats = options.pipeline.stages, model.spec, model.plan.formats
    if options.pipeline.pipeline_split is not None:
        return split_as_asked(spec, options.pipeline.pipeline_split)
    equal = split_layers(spec, count, formats)
    if host is None:
        return equal
    method = model.quantization.method if model.quantization else None
    ceiling = compute_ceiling(model.dtype, method, keeps_bits=model.keeps_bits)
    speeds = stage_speeds(host.cores(), lambda stages: host.measure(stages, ceiling))
    slow = None if speeds is None else slowness(speeds)
    asked = options.kv_cache_space
    first, *others = host.rooms()
    rooms = [None if first is None else max(first - beside_first, 0), *others]
    room = StageRoom(rooms, model.weight_bytes // BESIDE_WEIGHTS if asked is None else int(asked * _GIB))
    planned = split_layers(spec, count, formats, slow, room)
    if planned != equal:
        by_speed = split_layers(spec, count, formats, slow)
        reasons = [
            *([] if speeds is None or by_speed == equal else [f"by measured speed: {_in_words(speeds)}"]),
            *([] if planned == by_speed else [f"by memory: {_room_in_words(room)}"]),
        ]
        logger.info(
            "The stages have %s layers, and not %s as equal ones would, %s",
            _counts(planned),
            _counts(equal),
            "; and ".join(reasons),
        )
    return planned


def _staged(options: EngineOptions, model: OpenedModel) -> Device:
    if not model.device.capabilities.stages:
        raise DeviceError(
            f"--pipeline-parallel-size {options.pipeline.stages} needs --device cpu: the {model.device.name} device "
            "has no stages"
        )
    return model.device


def _counts(stages: Sequence[StageSpec]) -> str:
    return ",".join(str(stage.end - stage.begin) for stage in stages)


def _in_words(speeds: Sequence[StageSpeed]) -> str:
    return ", ".join(f"stage {number} {speed}" for number, speed in enumerate(speeds, 1))


def _room_in_words(room: StageRoom) -> str:
    known = [(number, num_bytes) for number, num_bytes in enumerate(room.bytes, 1) if num_bytes is not None]
    return ", ".join(f"stage {number} may take {num_bytes / _GIB:.2f} GiB" for number, num_bytes in known)


def stages_bytes(model: OpenedModel, stages: Sequence[StageSpec], max_num_batched_tokens: int) -> int:
    """The bytes of all stages' weights, and of the rows between them. Two stages have a tied embedding."""
    rows = len(stages) * max_num_batched_tokens * stage_row_floats(model.spec) * _FLOAT_BYTES
    whole = stage_bytes(model.spec, StageSpec(0, len(model.spec.layers), len(model.spec.layers)), model.plan.formats)
    twice = sum(stage_bytes(model.spec, stage, model.plan.formats) for stage in stages) - whole
    return model.weight_bytes + twice + rows


def memory_of(
    host: StageHost, model: OpenedModel, stages: Sequence[StageSpec], draft: OpenedDraft | None = None
) -> Memory:
    """The memory for a whole model whose stages `host` has; the first stage has the `draft` model too."""
    weights = [stage_bytes(model.spec, stage, model.plan.formats) for stage in stages]
    if draft is not None:
        weights[0] += draft.model.weight_bytes
    return host.memory(weights)


def load_pipeline(
    options: EngineOptions,
    model: OpenedModel,
    stages: Sequence[StageSpec],
    executor_options: ExecutorOptions,
    cancellation: Cancellation,
    host: StageHost,
    draft: OpenedDraft | None = None,
) -> PipelineExecutor:
    """Start the stages' processes where `host` has them. Wait until they have loaded their weights, and the first one
    a `draft` model's too.

    Raises DeviceError for a stage that cannot load, and LoadCancelledError.
    """
    device, count = model.device, len(stages)
    limits = device.limits(model.spec, executor_options)
    shape = SlotShape(len(limits.groups), count, stage_row_floats(model.spec))
    # What was chosen here is not chosen again, and adapters are read here alone.
    lora = replace(options.lora, lora_modules=(), lora_resolver_cache_dir=None)
    options = replace(options, device=device.name, lora=lora)
    planned = None if draft is None else _plan_draft(draft, limits, executor_options.max_model_len)
    plans = [
        StagePlan(options, executor_options, stage, index, shape, planned if stage.is_first else None)
        for index, stage in enumerate(stages)
    ]
    launch = host.launch(plans, model.weight_bytes)
    limits = replace(limits, pipeline_stages=count)
    split_adapter = partial(parts_of, spec=model.spec, stages=stages)
    return PipelineExecutor(limits, launch, cancellation, planned, split_adapter=split_adapter)


def _plan_draft(draft: OpenedDraft, limits: ExecutorLimits, max_model_len: int) -> DraftPlan:
    """Plan a draft model for a model with these `limits`."""
    device, executor_options = draft.model.device, draft.executor_options(limits, max_model_len)
    own_limits = device.limits(draft.model.spec, executor_options)
    return DraftPlan(draft.options, executor_options, own_limits)
