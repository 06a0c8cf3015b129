"""The device on which encoders are loaded, so that they can compute between the steps of a chat model."""

from __future__ import annotations

from ..devices import means_cpu
from ..devices.cpu.device import CpuDevice
from ..devices.cpu.options import CpuOptions
from ..devices.parallel_options import ParallelOptions
from ..options import EngineOptions


def shared_device(options: EngineOptions) -> CpuDevice | None:
    """The device of a chat model that runs on this machine's CPUs and in this process; None for any other."""
    if options.pipeline.stages > 1 or not means_cpu(options.device):
        return None
    cpu = next((group for group in options.device_options if isinstance(group, CpuOptions)), None)
    parallel = next((group for group in options.device_options if isinstance(group, ParallelOptions)), None)
    return CpuDevice(cpu, parallel)
