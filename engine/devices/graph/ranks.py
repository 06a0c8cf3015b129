"""Variables that show each of the processes which share a model its accelerator. Nothing here imports torch."""

from __future__ import annotations

import os

from ...errors import DeviceError


def variables_of(device: str, rank: int, size: int) -> dict[str, str]:
    """What process `rank` of `size` has to find in its environment before it imports torch.

    Raises DeviceError if the user's variable names fewer accelerators.
    """
    if device == "cuda":
        return {"CUDA_VISIBLE_DEVICES": _names("CUDA_VISIBLE_DEVICES", size)[rank]}
    if device == "rocm":
        # https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html
        known = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        variable = next((name for name in known if os.environ.get(name)), known[0])
        return {variable: _names(variable, size)[rank]}
    if device == "hpu":
        return _of_card(rank, size)
    if device == "neuron":
        return _of_core(rank, size)
    return {}


def _of_card(rank: int, size: int) -> dict[str, str]:
    # Unlike CUDA's, the list of modules is the same for all: a process has the one at its local rank.
    # https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Gaudi_Assignment.html
    modules = _names("HABANA_VISIBLE_MODULES", size)
    return {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "HABANA_VISIBLE_MODULES": ",".join(modules),
        "HLS_MODULE_ID": modules[rank],
    }


def _of_core(rank: int, size: int) -> dict[str, str]:
    # A process that shares a model may see one logical core only, and takes that of its local rank if it is not told.
    # https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/torch-distributed.html
    return {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "NEURON_RT_VISIBLE_CORES": _names("NEURON_RT_VISIBLE_CORES", size)[rank],
        "NEURON_RT_NUM_CORES": "1",
    }


def _names(variable: str, size: int) -> list[str]:
    """The first `size` accelerators that a variable leaves. It may have ranges, such as 0-3."""
    visible = os.environ.get(variable)
    names = _listed(visible) if visible else [str(rank) for rank in range(size)]
    if len(names) < size:
        raise DeviceError(f"{variable}={visible} names {len(names)} accelerators, fewer than --tensor-parallel-size")
    return names[:size]


def _listed(visible: str) -> list[str]:
    names = []
    for name in visible.split(","):
        first, dash, last = name.partition("-")
        is_range = dash and first.isdecimal() and last.isdecimal()
        # Longer than any machine has accelerators: the number comes from the environment.
        names += [str(n) for n in range(int(first), min(int(last), int(first) + 4095) + 1)] if is_range else [name]
    return names
