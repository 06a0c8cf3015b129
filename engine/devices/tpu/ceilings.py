"""Measures the most that the chips can do: read and write their memory, and multiply matrices in one type."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...weights.dtypes import DType
from .mesh import AXIS

_CHANGED_VALUES = 64 * 2**20  # float32, on each chip: several times what lies near its units
_SIDE = 8192  # of square matrices: enough work to hide what a call costs
_ON_PROCESSOR = 8  # what both are divided by there
_LONG_ENOUGH_S = 0.01  # for one look at the clock, which waits for the chips

Step = Callable[[jax.Array], jax.Array]


def measure_ceilings(mesh: Mesh, dtype: DType, seconds: float) -> dict[str, float]:
    """The most bytes a second that are read and written, and the most FLOPs a second of products of matrices.

    The names are `copy_bytes_per_second` and `<dtype>_flops`. All chips of the mesh work at once, and each has its own
    arrays: up to 0.5 GiB. It takes about `seconds`, and the time to compile two functions.
    """
    smaller = 1 if mesh.devices.flat[0].platform == "tpu" else _ON_PROCESSOR
    values, side = _CHANGED_VALUES // smaller, _SIDE // smaller

    # Each call takes the result of the last one, so that they cannot run side by side.
    change = jax.jit(jnp.negative, donate_argnums=0)
    seconds_per_change = _fastest(change, _on_each(mesh, (values,), "float32"), seconds / 2)

    right = _on_each(mesh, (side, side), dtype) / side
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    multiply = jax.jit(partial(jnp.matmul, precision=precision))
    seconds_per_product = _fastest(lambda left: multiply(left, right), _on_each(mesh, (side, side), dtype), seconds / 2)
    return {
        "copy_bytes_per_second": mesh.size * 2 * 4 * values / seconds_per_change,
        f"{dtype}_flops": mesh.size * 2 * side**3 / seconds_per_product,
    }


def _on_each(mesh: Mesh, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Ones on every chip, `[chips, *shape]`."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.jit(lambda: jnp.ones((mesh.size, *shape), dtype), out_shardings=sharding)()


def _fastest(step: Step, value: jax.Array, seconds: float) -> float:
    """The least seconds that one call took of those that fit into the time, without the first, which compiles."""
    value = step(value).block_until_ready()
    end = time.perf_counter() + seconds
    fastest, count = float("inf"), 1
    while (started := time.perf_counter()) < end or fastest == float("inf"):
        for _ in range(count):
            value = step(value)
        value.block_until_ready()
        took = time.perf_counter() - started
        fastest = min(fastest, took / count)
        if took < _LONG_ENOUGH_S:
            count *= 2
    return fastest
