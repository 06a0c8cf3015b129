"""From a model to its pipeline: what cannot be split is refused before weights are read, then the stages load."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ..cancellation import Cancellation
from ..devices.base import ExecutorOptions, StagedDevice
from ..errors import DeviceError
from ..load_progress import LoadProgress
from ..machine.cpu_list import cpu_list
from ..models.spec import StageSpec, stage_row_floats
from ..opened_model import OpenedModel
from ..options import EngineOptions
from ..speculative_options import DraftModel, Eagle3, Mtp
from .executor import PipelineExecutor
from .links import new_link
from .processes import StageProcesses
from .split import split_layers, stage_bytes
from .stage import StageStart
from .step_slot import StepSlot

logger = logging.getLogger(__name__)

_GIB = 2**30
_FLOAT_BYTES = 4


def plan_stages(options: EngineOptions, model: OpenedModel) -> list[StageSpec]:
    """The stages of a model, of which there are several. Raises DeviceError and ModelError for what cannot be split."""
    asked = f"--pipeline-parallel-size {options.pipeline.stages}"
    if not isinstance(model.device, StagedDevice):
        raise DeviceError(f"{asked} needs --device cpu: the {model.device.name} device has no stages")
    if options.lora.enable_lora:
        raise DeviceError(f"{asked} and --enable-lora do not work together: leave one of them out")
    if options.kv_offload is not None:
        raise DeviceError(f"{asked} and --kv-offload do not work together: leave one of them out")
    if isinstance(options.speculative.speculation, DraftModel | Mtp | Eagle3):
        raise DeviceError(
            f"{asked} and a draft model, MTP or EAGLE3 layers do not work together: leave one of them out, or "
            "guess with the methods ngram or suffix"
        )
    return split_layers(model.spec, options.pipeline.stages, model.formats, options.pipeline.pipeline_split)


def stages_bytes(model: OpenedModel, stages: Sequence[StageSpec], max_num_batched_tokens: int) -> int:
    """What the weights of all stages take, and the rows between them. A tied embedding is in two of them."""
    rows = len(stages) * max_num_batched_tokens * stage_row_floats(model.spec) * _FLOAT_BYTES
    whole = stage_bytes(model.spec, StageSpec(0, len(model.spec.layers), len(model.spec.layers)), model.formats)
    twice = sum(stage_bytes(model.spec, stage, model.formats) for stage in stages) - whole
    return model.weight_bytes + twice + rows


def load_pipeline(
    options: EngineOptions,
    model: OpenedModel,
    stages: Sequence[StageSpec],
    executor_options: ExecutorOptions,
    cancellation: Cancellation,
) -> PipelineExecutor:
    """Start the processes of the stages, and wait until they have loaded their weights.

    Raises DeviceError for a stage that cannot load, and LoadCancelledError.
    """
    device, count = model.device, len(stages)
    assert isinstance(device, StagedDevice)
    limits = device.limits(model.spec, executor_options)
    groups, row_floats = device.stage_groups(count), stage_row_floats(model.spec)
    with ExitStack() as unfinished:
        slots = [StepSlot(len(limits.groups), count, row_floats) for _ in stages]
        for slot in slots:
            unfinished.callback(slot.close)
        links = [new_link() for _ in range(count + 1)]  # link i leads to stage i, and the last one back
        masks = new_link()
        ends = [end for link in (*links, masks) for end in link]
        for end in ends:
            unfinished.callback(end.close)
        starts = [
            StageStart(
                # What was chosen here is not chosen again.
                options=replace(options, device=device.name),
                executor_options=executor_options,
                stage=stage,
                index=index,
                cpus=groups[index],
                upstream=links[index][1].fileno(),
                downstream=links[index + 1][0].fileno(),
                masks=masks[1].fileno() if stage.is_last else -1,
                slots=[slot.fd for slot in slots],
                num_groups=len(limits.groups),
                num_stages=count,
                row_floats=row_floats,
            )
            for index, stage in enumerate(stages)
        ]
        processes = StageProcesses(starts)
        unfinished.callback(processes.close)
        unfinished.callback(processes.stop_loading)
        kept = links[0][0], links[-1][1], masks[0]
        _close_others(ends, kept)
        try:
            with (
                cancellation.calling(processes.stop_loading),
                LoadProgress(options.model, model.weight_bytes) as progress,
            ):
                processes.load(progress.report)
        except DeviceError:
            cancellation.check()
            raise
        executor = PipelineExecutor(
            replace(limits, pipeline_stages=count), model.spec.vocab_size, processes, slots, *kept
        )
        unfinished.pop_all()
    for index, loaded in enumerate(processes.stages):
        logger.info(
            "%s: process %d on CPUs %s, %.2f GiB of weights, %.2f GiB of KV cache",
            processes.name(index),
            loaded.process.pid,
            cpu_list(loaded.cpus),
            loaded.weight_bytes / _GIB,
            loaded.cache_bytes / _GIB,
        )
    return executor


def _close_others(ends: Sequence[socket.socket], kept: Sequence[socket.socket]) -> None:
    """Close what belongs to the stages, so that the end of a process is heard."""
    for end in ends:
        if end not in kept:
            end.close()
