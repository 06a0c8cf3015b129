"""The kernel of experts gives the products of their matrices, and compiles for the GPUs that it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from optional_packages import require_packages
from samples import swept

pytest.importorskip("torch")
require_packages("triton")

TESTS = Path(__file__).parents[3]
# The bytes that a program may share, from https://docs.nvidia.com/cuda/cuda-c-programming-guide/ and AMD's guides.
TARGETS = {
    "sm_80": ("cuda", 80, 32, 163 << 10),
    "sm_90": ("cuda", 90, 32, 227 << 10),
    "sm_100": ("cuda", 100, 32, 227 << 10),
    "gfx942": ("hip", "gfx942", 64, 64 << 10),
    "gfx1100": ("hip", "gfx1100", 32, 64 << 10),
}


@pytest.mark.parametrize("cases", [[("float32", 1)], swept([("float32", 16), ("float16", 32), ("float16", 256)])])
def test_the_interpreted_kernel_gives_the_products(cases: list[tuple[str, int]]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "engine.devices.graph.interpreted_experts", json.dumps(cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=TESTS)
    assert run.returncode == 0, run.stderr
    for case, error in zip(cases, json.loads(run.stdout), strict=True):
        assert error < (1e-6 if case[0] == "float32" else 2e-3), case


@pytest.mark.parametrize("target", [name if name == "sm_90" else swept(name) for name in TARGETS])
@pytest.mark.parametrize("size", [128, swept(1), swept(32)])
def test_it_compiles_for_gpus(target: str, size: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tidewheel.engine.devices.graph.kernels.experts import multiply_kernel, tiles_of

    backend, arch, warp_size, shared_bytes = TARGETS[target]
    tiles = tiles_of(size)
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"SIZE": size, **tiles}
    types = {
        "x": "*bf16",
        "matrices": "*bf16",
        "experts": "*i64",
        "used": "*i64",
        "out": "*bf16",
        "N": "i32",
        "K": "i32",
    }
    aligned = [(multiply_kernel.arg_names.index(name),) for name in types]
    source = ASTSource(
        multiply_kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constants,
        {index: [["tt.divisibility", 16]] for index in aligned},
    )
    made = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)
    assert made.metadata.shared <= shared_bytes
    if target == "sm_90":
        assert ("wgmma" if size >= 64 else "mma.sync") in made.asm["ptx"], "its tensor cores multiply"
