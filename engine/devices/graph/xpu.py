"""Intel GPUs, through torch.xpu: https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

import torch

from ...machine.memory import read_memory
from .adapter import DeviceMemory
from .cuda import CudaAdapter
from .options import GraphOptions

logger = logging.getLogger(__name__)


class XpuAdapter(CudaAdapter):
    """One GPU. Steps are captured if torch has graphs for it. Raises DeviceError if torch finds no GPU."""

    name = "xpu"

    _gpus: ClassVar[ModuleType] = torch.xpu
    _device_type = "xpu"
    _built_for = ("xpu", "support for Intel GPUs")
    _where_to_look = (
        "clinfo -l lists one (docker run --device=/dev/dri) and that ZE_AFFINITY_MASK or ONEAPI_DEVICE_SELECTOR does "
        "not hide it"
    )
    _graph = "XPUGraph"
    _capture_options: ClassVar[Mapping[str, str]] = {}  # only the stream of the capture is recorded

    def __init__(self, options: GraphOptions) -> None:
        super().__init__(options)
        if self._is_compiled and not self.captures:
            logger.info("Steps are compiled and not captured: torch %s has no torch.xpu.XPUGraph", torch.__version__)
        self._properties = torch.xpu.get_device_properties(self.device)
        self.has_float64 = bool(self._properties.has_fp64)  # the Arc A series has none
        try:
            super().memory()
        except RuntimeError as error:  # https://github.com/pytorch/pytorch/pull/194487
            logger.info("The machine's free memory counts, because the GPU does not tell its own: %s", error)
            self._tells_free_memory = False
        else:
            self._tells_free_memory = True

    def memory(self) -> DeviceMemory:
        """What the driver has. An integrated GPU uses the machine's memory, and may not tell what it can still take."""
        if self._tells_free_memory:
            return super().memory()
        total = self._properties.total_memory
        left = total - torch.xpu.memory_reserved(self.device)
        available = read_memory().available
        return DeviceMemory(left if available is None else min(left, available), total)
