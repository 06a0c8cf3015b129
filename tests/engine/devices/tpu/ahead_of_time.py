"""The device's programs, compiled for TPUs by their own compiler, libtpu's. No TPU is needed for that."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.devices.tpu.buckets import page_size
from tidewheel.engine.devices.tpu.device import TpuDevice
from tidewheel.engine.devices.tpu.heads import Kernel, with_heads_for
from tidewheel.engine.devices.tpu.loading import Loader
from tidewheel.engine.devices.tpu.mesh import AXIS, weight_sharding
from tidewheel.engine.devices.tpu.options import TpuOptions
from tidewheel.engine.devices.tpu.programs import Program, Programs
from tidewheel.engine.devices.tpu.stacks import array_shapes
from tidewheel.engine.models.spec import DecoderSpec, tensor_shapes
from tidewheel.engine.weights.dtypes import STORAGE
from tidewheel.engine.weights.quantization import is_router

CHIPS = {
    "v4": ("v4:2x2x1", 1),
    "v5e": ("v5e:2x2", 1),
    "v5e-4": ("v5e:2x2", 4),
    "v5p": ("v5p:2x2x1", 1),
    "v6e": ("v6e:2x2", 1),
}
"""What programs are compiled for: a slice as libtpu names it, and how many of its chips."""

KERNEL = "tpu_custom_call"
"""What compiled programs call Pallas kernels."""

# Else libtpu asks the metadata server of Google's cloud which TPU this machine has, and runs in one process at a time.
_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# The compiler looks less for a fast order of instructions, which is most of its time. What it refuses of layouts, of
# memory and in Pallas kernels, it refuses in the same words. The number is XLA's for level O0: JAX 0.10 takes no name.
_LEAST_EFFORT = {"optimization_level": 9}

Described = Mapping[str, jax.ShapeDtypeStruct]


@functools.cache
def mesh_of(chips: str) -> Mesh:
    """The chips of that name in CHIPS. They can be compiled for, and not be computed with."""
    from jax.experimental import topologies

    topology, count = CHIPS[chips]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _MACHINE.items():
            patch.setenv(name, value)
        devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    return Mesh(np.array(devices[:count]), (AXIS,))


class Compiler:
    """Compiles what the device would for a model on chips, with a cache of few blocks, which change no program."""

    def __init__(self, spec: DecoderSpec, chips: str, dtype: str = "bfloat16", **options: Any) -> None:
        mesh = mesh_of(chips)
        asked = ExecutorOptions(
            **{
                "dtype": dtype,
                "kv_cache_bytes": None,
                "max_model_len": 4096,
                "max_num_seqs": 128,
                "max_num_batched_tokens": 2048,
                "num_blocks": 64,
                **options,
            }
        )
        kernel = Kernel(True, mesh.size, STORAGE[asked.cache_dtype].itemsize)
        device = TpuDevice(parallel=ParallelOptions(tensor_parallel_size=mesh.size))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_PLATFORMS", "tpu")
            groups = device.kv_group_bytes(spec, asked.cache_dtype)
        spec = with_heads_for(spec, mesh.size)
        self._params: Described = {
            name: jax.ShapeDtypeStruct(
                shape,
                dtype if name.endswith(".weight") and len(shape) > 1 and not is_router(name) else "float32",
                sharding=weight_sharding(mesh, name, shape),
            )
            for name, shape in array_shapes(tensor_shapes(spec)).items()
        }
        states = device.slot_bytes(spec)
        self._loader = Loader(spec, asked, TpuOptions(), MemoryOptions(), kernel, groups, states, mesh)
        limits = asked.limits(groups, page_size(asked.max_model_len, asked.max_num_seqs), state_bytes=states)
        self.programs: Programs = self._loader.programs(self._params, limits)
        self.working_bytes: Callable[[], int] = functools.partial(self._loader.working_bytes, self._params)


class Steps:
    """Steps that libtpu compiles with the least effort. Models with the same step share it."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, bytes], int] = {}

    def num_kernels(self, program: Program, chips: str) -> int:
        """How many Pallas kernels of our own a program for chips has. Raises what the compiler does."""
        lowered = program.function.lower(*program.arguments)
        key = chips, hashlib.sha256(lowered.as_text().encode()).digest()
        if key not in self._kernels:
            lines = lowered.compile(_LEAST_EFFORT).as_text().splitlines()
            calls = [line for line in lines if f'custom_call_target="{KERNEL}"' in line]
            self._kernels[key] = sum("ragged-dot" not in line for line in calls)  # those are of XLA, for experts
        return self._kernels[key]
