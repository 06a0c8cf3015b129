"""Devices by name. Each is imported only when asked for: the CPU's needs no torch, torch's no native extension."""

from __future__ import annotations

from ..errors import DeviceError
from .base import Device

__all__ = ["DEVICE_NAMES", "get_device"]

DEVICE_NAMES = ("auto", "cpu", "torch")


def get_device(name: str) -> Device:
    """The device that `--device name` means; auto is the CPU. Raises DeviceError for a name that is not known."""
    if name in ("auto", "cpu"):
        from .cpu.device import CpuDevice

        return CpuDevice()
    if name == "torch":
        from .torch_reference import TorchDevice

        return TorchDevice()
    raise DeviceError(f"device {name!r} is not known; known are {', '.join(DEVICE_NAMES)}")
