"""From a model to its pipeline: what cannot be split is refused before weights are read, then the stages load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cancellation import Cancellation
from ..devices.base import ExecutorOptions, StagedDevice
from ..errors import DeviceError
from ..machine.memory import Memory
from ..models.spec import StageSpec, stage_row_floats
from ..opened_model import OpenedModel
from ..options import EngineOptions
from .executor import PipelineExecutor
from .local_stages import local_launch
from .runner import StagePlan
from .split import split_layers, stage_bytes
from .stages import StageHost
from .step_slot import SlotShape

_FLOAT_BYTES = 4


def plan_stages(options: EngineOptions, model: OpenedModel) -> list[StageSpec]:
    """The stages of a model, of which there are several. Raises DeviceError and ModelError for what cannot be split."""
    asked = f"--pipeline-parallel-size {options.pipeline.stages}"
    if not isinstance(model.device, StagedDevice):
        raise DeviceError(f"{asked} needs --device cpu: the {model.device.name} device has no stages")
    return split_layers(model.spec, options.pipeline.stages, model.formats, options.pipeline.pipeline_split)


def stages_bytes(model: OpenedModel, stages: Sequence[StageSpec], max_num_batched_tokens: int) -> int:
    """What the weights of all stages take, and the rows between them. A tied embedding is in two of them."""
    rows = len(stages) * max_num_batched_tokens * stage_row_floats(model.spec) * _FLOAT_BYTES
    whole = stage_bytes(model.spec, StageSpec(0, len(model.spec.layers), len(model.spec.layers)), model.formats)
    twice = sum(stage_bytes(model.spec, stage, model.formats) for stage in stages) - whole
    return model.weight_bytes + twice + rows


def memory_of(host: StageHost, model: OpenedModel, stages: Sequence[StageSpec]) -> Memory:
    """What there is for a whole model whose stages `host` has."""
    return host.memory([stage_bytes(model.spec, stage, model.formats) for stage in stages])


def load_pipeline(
    options: EngineOptions,
    model: OpenedModel,
    stages: Sequence[StageSpec],
    executor_options: ExecutorOptions,
    cancellation: Cancellation,
    host: StageHost | None,
) -> PipelineExecutor:
    """Start the processes of the stages, here or where `host` has them, and wait until they have loaded their weights.

    Raises DeviceError for a stage that cannot load, and LoadCancelledError.
    """
    device, count = model.device, len(stages)
    assert isinstance(device, StagedDevice)
    limits = device.limits(model.spec, executor_options)
    shape = SlotShape(len(limits.groups), count, stage_row_floats(model.spec))
    options = replace(options, device=device.name)  # what was chosen here is not chosen again
    plans = [StagePlan(options, executor_options, stage, index, shape) for index, stage in enumerate(stages)]
    if host is not None:
        launch = host.launch(plans)
    else:
        launch = local_launch(plans, device.stage_groups(count), model.weight_bytes)
    return PipelineExecutor(replace(limits, pipeline_stages=count), model.spec.vocab_size, launch, cancellation)
