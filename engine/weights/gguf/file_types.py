"""`general.file_type`: what the quantization of a whole GGUF file is called, as in Q4_K_M."""

from __future__ import annotations

from ..block_mix import BlockMix
from .fields import Fields
from .reader import GgufFile

# https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h, llama_ftype.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
}  # fmt: skip

_NUMBERS = {name: number for number, name in _FILE_TYPES.items()}


def file_type_number(mix: BlockMix) -> int:
    """The number of a file whose types are chosen by `mix`."""
    return _NUMBERS["Q4_K_M" if mix == "int4" else mix.upper()]


def file_type_of(file: GgufFile) -> str | None:
    """The name, if the file says one that is known."""
    number = Fields(file).raw("general.file_type")
    return _FILE_TYPES.get(number) if type(number) is int else None
