"""The chips that share a model, and what each holds of it (https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...errors import DeviceError

AXIS = "model"

_BY_OUTPUT = {
    *("q", "k", "v", "q_gate", "gate", "up", "embed", "head"),
    *("latent_q", "latent_q_up", "latent_k_up", "latent_v_up"),
    *("delta_q", "delta_k", "delta_v", "delta_z", "delta_a", "delta_b"),
    *("mamba_z", "mamba_x", "mamba_B", "mamba_C", "mamba_dt", "conv_b", "conv_c", "conv_x"),
}
_BY_INPUT = {"o", "down", "latent_o", "delta_out", "mamba_out", "conv_out"}


def make_mesh(num_devices: int) -> Mesh:
    """The first chips of this machine. Raises DeviceError if there are fewer."""
    devices = jax.local_devices()
    if num_devices > len(devices):
        raise DeviceError(
            f"--tensor-parallel-size {num_devices} needs as many chips, and JAX finds {len(devices)} here: "
            f"choose at most {len(devices)}"
        )
    return Mesh(np.array(devices[:num_devices]), (AXIS,))


def first_chip(mesh: Mesh) -> jax.Device:
    """One that speaks for the others: all hold as much."""
    return mesh.devices.flat[0]


def replicated(mesh: Mesh) -> NamedSharding:
    """What is the same on all chips."""
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh: Mesh, dimension: int) -> NamedSharding:
    """What is divided evenly among the chips in one dimension."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dimension, AXIS))


def pages_partition(ndim: int) -> PartitionSpec:
    """Pages by KV heads: `[pages, size, 2 * KV heads, D]`, or with 5 dimensions `[pages, KV heads, size, 2, D]`."""
    return PartitionSpec(None, AXIS) if ndim == 5 else PartitionSpec(None, None, AXIS)


def pages_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """The same for the chips of a mesh."""
    return NamedSharding(mesh, pages_partition(ndim))


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Projections into heads, MLP, experts and recurrences by outputs, those back by inputs, embedding and head by
    tokens, sinks by heads.

    What cannot be divided evenly, and all else, is on every chip.
    """
    part = name.split(".")[-2:]
    dimension = None
    if (part[0] in _BY_OUTPUT and part[1] in ("weight", "bias")) or part[1] == "sinks":
        dimension = len(shape) - 1 if ".experts." in name else 0  # matrices of experts are the other way round
    elif part[0] in _BY_INPUT and part[1] == "weight":
        dimension = 1
    if dimension is None or shape[dimension] % mesh.size:
        return replicated(mesh)
    return sharded(mesh, dimension)
