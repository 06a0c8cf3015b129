"""Triton's compiler for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
    """What Triton calls a GPU, and the bytes that a program's threads may share."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int


# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications and
# https://rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10),
    "sm_90": Target("cuda", 90, 32, 227 << 10),
    "sm_100": Target("cuda", 100, 32, 227 << 10),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),
    "gfx1100": Target("hip", "gfx1100", 32, 64 << 10),
}


def compile_for(target: Target, kernel: Any, types: Mapping[str, str], sizes: Mapping[str, Any]) -> Any:
    """What Triton makes of a kernel. `types` are those of its arguments; what `sizes` has is constant, or an option."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    aligned = [(kernel.arg_names.index(name),) for name, type_name in types.items() if type_name != "fp32"]
    source = ASTSource(
        kernel,
        dict(types) | dict.fromkeys(constants, "constexpr"),
        constants,
        {index: [["tt.divisibility", 16]] for index in aligned},
    )
    options = {name: value for name, value in sizes.items() if name not in constants}
    made = triton.compile(source, target=GPUTarget(*target[:3]), options=options)
    assert made.metadata.shared <= target.shared_bytes
    return made
