"""The kernel of grouped matrices gives the products of their weights, and compiles for the GPUs that it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine.weights.stored_tensors import KINDS, SOME_KINDS, stored
from optional_packages import require_packages
from samples import swept

from tidewheel.engine.devices.grouped_weights import GroupedMatrix
from tidewheel.engine.devices.grouping import grouped

torch = pytest.importorskip("torch")
require_packages("triton")

TESTS = Path(__file__).parents[3]
# A kind, the tokens' type, the tokens of a block, inputs, and the matrices of blocks; None: one block, one matrix.
Case = tuple[str, str, int, int, list[int] | None]
EVERY_KIND: list[Case] = [(kind, "float32", 3, 512, None) for kind in KINDS]
OTHERS: list[Case] = [
    ("q4_k", "float16", 20, 256, None),
    ("q8_0", "float16", 3, 96, None),  # which fill no tile
    ("mxfp4", "float16", 3, 96, None),
    ("awq", "float32", 2, 2048, None),  # shared out among several programs
    ("q4_k", "float32", 1, 256, [2, 0, 2, 1]),
    ("e4m3-block", "float16", 18, 256, [1, 0]),
    ("gptq-4", "float32", 2, 256, [0, 1]),
]
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
# Of a thread block, https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications, and
# of a workgroup, https://rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx1100": 64 << 10}


@pytest.mark.parametrize(
    "cases", [OTHERS[:1] + OTHERS[3:], swept(EVERY_KIND + OTHERS)], ids=["different kernels", "every kind"]
)
def test_the_interpreted_kernel_gives_the_products_of_the_weights(cases: list[Case]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "engine.devices.graph.interpreted_products", json.dumps(cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=TESTS)
    assert run.returncode == 0, run.stderr
    for case, error in zip(cases, json.loads(run.stdout), strict=True):
        assert error < (1e-6 if case[1] == "float32" else 2e-3), case


def compiled(target: str, matrix: GroupedMatrix, size: int, *, in_blocks: bool = False) -> Any:
    """What Triton makes of the kernel for `size` tokens in bfloat16 and the large matrix that this is a part of."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tidewheel.engine.devices.graph.grouped import Grouped
    from tidewheel.engine.devices.graph.kernels.grouped_matmul import grouped_matmul, tile_sizes

    kept = Grouped(matrix, torch.bfloat16, torch.device("cpu"))
    in_four = matrix.values not in ("int8", "e4m3")
    sizes = tile_sizes(size, 4096, 2048, 1, in_four=in_four)
    types = {"int8": "i8", "uint8": "u8", "int16": "i16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

    def pointer(tensor: Any) -> str:
        return "constexpr" if tensor is None else f"*{types[str(tensor.dtype).removeprefix('torch.')]}"

    table = kept.table if matrix.values == "table4" else None
    arrays = {
        name: getattr(kept, name) for name in ("codes", "scales", "factors", "zeros", "minima", "minimum_factors")
    }
    signature = {"x": "*bf16", **{name: pointer(tensor) for name, tensor in (*arrays.items(), ("table", table))}}
    blocks = "*i64" if in_blocks else "constexpr"
    signature |= {"experts": blocks, "used": blocks, "y": "*fp32" if sizes["SPLITS"] > 1 else "*bf16"}
    signature |= dict.fromkeys(("size", "outputs", "inputs", "code_stride", "scale_stride", "factor_stride"), "i32")
    constants = {
        "VALUES": matrix.values,
        "MIDDLE": matrix.middle,
        "GROUP": triton.next_power_of_2(matrix.group_size),
        "RUN": matrix.factor_run,
        **sizes,
    }
    names = grouped_matmul.arg_names
    values = {(names.index(name),): None for name, kind in signature.items() if kind == "constexpr"}
    values |= {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")] + ["outputs", "inputs", "code_stride"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(grouped_matmul, signature | dict.fromkeys(constants, "constexpr"), values, attributes)
    stages = 1 if table is not None else 2 if TARGETS[target][0] == "hip" else 3
    options = {"num_warps": 4 if sizes["BLOCK_T"] <= 64 else 8, "num_stages": stages}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


@pytest.mark.parametrize("target", [name if name == "sm_90" else swept(name) for name in TARGETS])
@pytest.mark.parametrize(
    ("kind", "size", "in_blocks"),
    [
        ("q4_k", 1, False),
        *(swept(kind, 1, False) for kind in SOME_KINDS[1:]),
        *(swept(kind, 512, False) for kind in ("q4_k", "int8", "e4m3-block")),
        swept("nf4", 64, False),
        swept("mxfp4", 32, True),
    ],
)
def test_it_compiles_for_gpus(target: str, kind: str, size: int, in_blocks: bool) -> None:
    made = compiled(target, grouped(stored(kind, (4, 512), kind)), size, in_blocks=in_blocks)
    assert made.metadata.shared <= SHARED_BYTES[target]
    if target == "sm_90":
        assert "wgmma.mma_async" in made.asm["ptx"], "its tensor cores multiply"
