"""Which kernels a device has."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

logger = logging.getLogger(__name__)


@cache
def kernels_of(name: str, device: torch.device) -> ModuleType | None:
    """The module of that name beside this one, whose kernels such a device runs; None: it has no Triton."""
    built_for_gpus = torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None)
    if device.type not in ("cuda", "xpu") or not built_for_gpus:
        return None
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        logger.warning(
            "triton is not installed: torch's own operations take the place of its kernel for %s, and are slower",
            name.replace("_", " "),
        )
        return None
