"""Devices by name. Each is imported only when asked for: the CPU's needs no torch, torch's no native extension."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ..declaring.option import Options, options_of
from .cpu.options import CpuOptions

if TYPE_CHECKING:
    from .base import Device

__all__ = ["DEVICE_NAMES", "DEVICE_OPTIONS", "get_device"]

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """Where a device is, and the options that only it has: it is made with a group of them, or None."""

    module: str
    device: str
    options: type[Options] | None


_DEVICES = {
    "cpu": _Entry(".cpu.device", "CpuDevice", CpuOptions),
    "torch": _Entry(".torch_reference", "TorchDevice", None),
}
_DEFAULT = "cpu"

DEVICE_NAMES = ("auto", *_DEVICES)
DEVICE_OPTIONS = tuple(entry.options for entry in _DEVICES.values() if entry.options is not None)
"""The options of single devices, a group a device."""


def get_device(name: str, options: Iterable[Options] = ()) -> Device:
    """The device that `--device name` means, one of DEVICE_NAMES; auto is the CPU.

    It gets its own group of the options. That a group of another device has no effect is logged.
    """
    if name == "auto":
        name = _DEFAULT
    module, device, own = _DEVICES[name]
    groups = {type(group): group for group in options}
    for other, entry in _DEVICES.items():
        if other != name and entry.options in groups:
            flags = ", ".join(option.flag for option in options_of(entry.options))
            logger.warning("The options of the %s device (%s) have no effect on the %s device", other, flags, name)
    make: Callable[..., Device] = getattr(import_module(module, __package__), device)
    return make() if own is None else make(groups.get(own))
