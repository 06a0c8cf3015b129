"""What each method stores of a rounded matrix, and what config.json says of it, as the method's own tools write it.

`engine/weights/quantized/` reads these formats, and describes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from ..weights.bits import pack
from ..weights.dtypes import STORAGE, DType, bfloat16_bits
from .gptq import DAMP, Grid, RoundedMatrix
from .module_names import fused_names, patterns

if TYPE_CHECKING:
    from typing_extensions import TypeIs

FolderMethod = Literal["gptq", "awq", "int8"]
FOLDER_METHODS: tuple[FolderMethod, ...] = get_args(FolderMethod)

Array = NDArray[Any]


def is_folder_method(name: str) -> TypeIs[FolderMethod]:
    """Whether it is a method of folders, and not a mix of GGUF's types."""
    return name in FOLDER_METHODS


GROUP_SIZES = (128, 64, 32)
"""In the order in which they are preferred."""

_OUTPUT_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ's


class Layout(Protocol):
    """A method.

    `groups`: it has groups of GROUP_SIZES inputs, the same in the whole model; else a row is one group. A matrix has
    whole multiples of `inputs` inputs and of `outputs` outputs, or the method's kernels do not take it.
    """

    groups: bool
    inputs: int
    outputs: int

    def grid(self, group_size: int, dtype: DType) -> Grid:
        """What a matrix that is stored as `dtype` is rounded to."""

    def tensors(self, matrix: RoundedMatrix, grid: Grid) -> Mapping[str, Array]:
        """What is stored of it, by the last part of the names; bfloat16 as its bits."""

    def config(self, group_size: int | None, kept: Collection[str], quantized: Collection[str]) -> dict[str, Any]:
        """The `quantization_config` of a model with these modules, of which some are kept as they are."""


class GptqLayout:
    """GPTQ of 4 bits, symmetric, without an order of inputs, in the format `gptq`."""

    groups = True
    inputs = outputs = 32

    def grid(self, group_size: int, dtype: DType) -> Grid:
        """Scales are float16 in all such files."""
        return Grid(4, group_size, symmetric=True)

    def tensors(self, matrix: RoundedMatrix, grid: Grid) -> Mapping[str, Array]:
        """`qweight [K / 8, N]`, `qzeros [G, N / 8]` less one, `scales [G, N]` and `g_idx [K]`."""
        return {
            "qweight": np.ascontiguousarray(_words(matrix.codes).T),
            "qzeros": _words(matrix.zeros.T - np.uint8(1)),
            "scales": np.ascontiguousarray(matrix.scales.T, np.float16),
            "g_idx": np.arange(matrix.codes.shape[1], dtype="<i4") // grid.group_size,
        }

    def config(self, group_size: int | None, kept: Collection[str], quantized: Collection[str]) -> dict[str, Any]:
        """As GPTQModel writes it. vLLM looks for its own names of matrices that it has joined to one."""
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": 4,
            "group_size": group_size,
            "sym": True,
            "desc_act": False,
            "static_groups": True,
            "damp_percent": DAMP,
            "lm_head": False,
            "pack_dtype": "int32",
            "dynamic": {f"-:{pattern}": {} for pattern in patterns(fused_names(kept), quantized)},
        }


class AwqLayout:
    """AWQ's format of version `gemm`: 4 bits with zero points. Its kernels compute 64 outputs at once."""

    groups = True
    inputs, outputs = 32, 64

    def grid(self, group_size: int, dtype: DType) -> Grid:
        """Scales are float16 in all such files."""
        return Grid(4, group_size, symmetric=False)

    def tensors(self, matrix: RoundedMatrix, grid: Grid) -> Mapping[str, Array]:
        """`qweight [K, N / 8]`, `qzeros [G, N / 8]`, `scales [G, N]`."""
        return {
            "qweight": _interleaved(matrix.codes),
            "qzeros": _interleaved(matrix.zeros),
            "scales": np.ascontiguousarray(matrix.scales.T, np.float16),
        }

    def config(self, group_size: int | None, kept: Collection[str], quantized: Collection[str]) -> dict[str, Any]:
        """As AutoAWQ writes it."""
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "modules_to_not_convert": sorted(kept),
        }


class Int8Layout:
    """compressed-tensors' `int-quantized` W8A8: int8 with a scale for each output, and for each token's activations.

    Tensor cores take int8 in lines of 16 bytes.
    """

    groups = False
    inputs = outputs = 16

    def grid(self, group_size: int, dtype: DType) -> Grid:
        """Scales are stored as the matrix was."""
        return Grid(8, group_size, symmetric=True, scales=dtype)

    def tensors(self, matrix: RoundedMatrix, grid: Grid) -> Mapping[str, Array]:
        """`weight [N, K]` in two's complement, and `weight_scale [N, 1]`."""
        scales = bfloat16_bits(matrix.scales) if grid.scales == "bfloat16" else matrix.scales
        return {
            "weight": (matrix.codes ^ np.uint8(grid.middle)).view(np.int8),
            "weight_scale": scales.astype(STORAGE[grid.scales]),
        }

    def config(self, group_size: int | None, kept: Collection[str], quantized: Collection[str]) -> dict[str, Any]:
        """As llm-compressor writes it."""
        numbers = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**numbers, "strategy": "channel", "dynamic": False},
            "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [f"re:{pattern}" for pattern in patterns(kept, quantized)],
            "kv_cache_scheme": None,
        }


LAYOUTS: Mapping[FolderMethod, Layout] = MappingProxyType(
    {"gptq": GptqLayout(), "awq": AwqLayout(), "int8": Int8Layout()}
)


def _words(numbers: NDArray[np.uint8]) -> Array:
    """Words `[R, C / 8]` of nibbles `[R, C]`, the first in the lowest bits."""
    return pack(numbers, 4).view("<i4")


def _interleaved(numbers: NDArray[np.uint8]) -> Array:
    """AWQ's words `[C, R / 8]` of nibbles `[R, C]`."""
    outputs, columns = numbers.shape
    ordered = numbers.T.reshape(columns, outputs // 8, 8)[:, :, _OUTPUT_OF_NIBBLE]
    return _words(ordered.reshape(columns, outputs))
