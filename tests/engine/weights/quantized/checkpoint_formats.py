"""Layers of quantized checkpoints made of random codes, with the weights that the formats' descriptions give them.

The oracle's sums are written for one weight at a time where that is how the format is described.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[Any]
Random = np.random.Generator
Layer = tuple[dict[str, Array], NDArray[np.float32]]
"""A layer's tensors by the last part of their names, and its weights `[N, K]`."""


@dataclass(frozen=True)
class Format:
    """A `quantization_config`, and what makes a layer `[N, K]` in it."""

    config: dict[str, Any]
    make: Callable[[Random, int, int], Layer]
    inputs: int = 64
    dense: tuple[str, ...] = ()  # parts of the names of layers that are left as they are


def words(numbers: Array, bits: int) -> NDArray[np.int32]:
    """Each row as 32-bit words of one long integer, whose lowest bits are the first number."""
    rows = []
    for row in numbers.tolist():
        whole = sum(int(number) << (i * bits) for i, number in enumerate(row))
        rows.append(np.frombuffer(whole.to_bytes(-(-len(row) * bits // 32) * 4, "little"), "<i4"))
    return np.array(rows, np.int32)


def scales_of(random: Random, *shape: int) -> NDArray[np.float16]:
    return ((random.random(shape) + 0.5) / 64).astype(np.float16)


def gptq(
    bits: int = 4, group: int = 32, sym: bool = False, desc_act: bool = False, stored: str = "gptq", **config: Any
) -> Format:
    """`stored` is the format of the zeros, whatever the config says."""

    def make(random: Random, outputs: int, inputs: int) -> Layer:
        size = inputs if group == -1 else group
        groups = -(-inputs // size)
        codes = random.integers(0, 2**bits, (inputs, outputs))
        zeros = np.full((groups, outputs), 2 ** (bits - 1)) if sym else random.integers(0, 2**bits, (groups, outputs))
        scales = scales_of(random, groups, outputs)
        g_idx = np.arange(inputs) // size
        if desc_act:
            g_idx = random.permutation(g_idx)
        kept_zeros = zeros if stored == "gptq_v2" else (zeros - 1) % 2**bits
        tensors = {
            "qweight": np.ascontiguousarray(words(codes.T, bits).T),
            "qzeros": words(kept_zeros, bits),
            "scales": scales,
            "g_idx": g_idx.astype(np.int32),
        }
        return tensors, (scales[g_idx].astype(np.float32) * (codes - zeros[g_idx]).astype(np.float32)).T

    fields = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    return Format({**fields, "checkpoint_format": stored, **config}, make)


def awq(group: int = 32) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        size = inputs if group == -1 else group
        groups = -(-inputs // size)
        codes, zeros = random.integers(0, 16, (inputs, outputs)), random.integers(5, 11, (groups, outputs))
        scales = scales_of(random, groups, outputs)
        order = [8 * word + nibble for word in range(outputs // 8) for nibble in (0, 2, 4, 6, 1, 3, 5, 7)]
        tensors = {"qweight": words(codes[:, order], 4), "qzeros": words(zeros[:, order], 4), "scales": scales}
        group_of = np.arange(inputs) // size
        return tensors, (scales[group_of].astype(np.float32) * (codes - zeros[group_of]).astype(np.float32)).T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, make)


def compressed(weights: Mapping[str, Any], format: str, make: Callable[[Random, int, int], Layer]) -> Format:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return Format({**config, "ignore": ["lm_head"], "quantization_status": "compressed"}, make)


def whole_words(numbers: Array, bits: int) -> NDArray[np.int32]:
    """Each row as words of as many whole numbers as they have room for, the first in the lowest bits."""
    each = 32 // bits
    rows = [[row[i : i + each] for i in range(0, len(row), each)] for row in numbers.tolist()]
    return np.concatenate([words(np.array([word]), bits) for row in rows for word in row]).reshape(len(rows), -1)


def packed(
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    actorder: bool = False,
    words: Callable[[Array, int], NDArray[np.int32]] = words,
) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        size = inputs if group is None else group
        groups, offset = -(-inputs // size), 2 ** (bits - 1)
        numbers = random.integers(-offset, offset, (outputs, inputs))
        zeros = np.zeros((outputs, groups), int) if symmetric else random.integers(-offset, offset, (outputs, groups))
        scales = scales_of(random, outputs, groups)
        g_idx = np.arange(inputs) // size
        tensors = {
            "weight_packed": words(numbers + offset, bits),
            "weight_shape": np.array([outputs, inputs]),
            "weight_scale": scales,
        }
        if actorder:
            g_idx = random.permutation(g_idx)
            tensors["weight_g_idx"] = g_idx.astype(np.int32)
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words((zeros + offset).T, bits).T)
        return tensors, scales[:, g_idx].astype(np.float32) * (numbers - zeros[:, g_idx]).astype(np.float32)

    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return compressed({**weights, "actorder": "group" if actorder else None}, "pack-quantized", make)


def int8(symmetric: bool = True, scale: str = "channel") -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        numbers = random.integers(-128, 128, (outputs, inputs))
        scales = scales_of(random, *((1,) if scale == "tensor" else (outputs, 1)))
        tensors: dict[str, Array] = {"weight": numbers.astype(np.int8), "weight_scale": scales}
        zeros = np.zeros((outputs, 1), int)
        if not symmetric:
            zeros = random.integers(-128, 128, (outputs, 1))
            tensors["weight_zero_point"] = zeros.astype(np.int8)
        return tensors, np.float32(scales) * (numbers - zeros).astype(np.float32)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": scale}
    return compressed(weights, "int-quantized", make)


def _e4m3(random: Random, outputs: int, inputs: int, scales: Array, scale_name: str, block: tuple[int, int]) -> Layer:
    codes = random.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    codes[codes & 127 == 127] = 0  # not a number
    weight = codes.view(ml_dtypes.float8_e4m3fn)
    rows, columns = np.arange(outputs) // block[0], np.arange(inputs) // block[1]
    values = scales.astype(np.float32).reshape(-1, -(-inputs // block[1]))[rows][:, columns]
    return {"weight": weight, scale_name: scales}, weight.astype(np.float32) * values


def e4m3(strategy: str) -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        block = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (128, 128)}[strategy]
        shape = (1,) if strategy == "tensor" else (-(-outputs // block[0]), -(-inputs // block[1]))
        return _e4m3(random, outputs, inputs, scales_of(random, *shape), "weight_scale", block)

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return compressed({**weights, "block_structure": [128, 128]}, "float-quantized", make)


def fp8(block: tuple[int, int] | None = (128, 128), scale_name: str = "weight_scale_inv") -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        size = block or (outputs, inputs)
        shape = (-(-outputs // size[0]), -(-inputs // size[1])) if block else ()
        scales = np.asarray(random.random(shape) / 64, np.float32)
        return _e4m3(random, outputs, inputs, scales, scale_name, size)

    return Format({"quant_method": "fp8", "weight_block_size": list(block) if block else None}, make)


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def fp4(kind: str) -> Format:
    group = 32 if kind == "mxfp4" else 16

    def make(random: Random, outputs: int, inputs: int) -> Layer:
        codes = random.integers(0, 16, (outputs, inputs))
        values = np.array([(-1 if code & 8 else 1) * E2M1[code & 7] for code in codes.flat], np.float32)
        tensors: dict[str, Array] = {
            "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        }
        if kind == "mxfp4":
            exponents = random.integers(118, 124, (outputs, inputs // group))
            tensors["weight_scale"] = exponents.astype(np.uint8)
            scales = np.float32(2.0) ** (exponents - 127).astype(np.float32)
        else:
            local = (random.random((outputs, inputs // group)) * 8).astype(ml_dtypes.float8_e4m3fn)
            tensors |= {"weight_scale": local, "weight_global_scale": np.array([60.0], np.float32)}
            scales = local.astype(np.float32) / np.float32(60)
        return tensors, values.reshape(outputs, inputs) * np.repeat(scales, group, 1)

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": group}
    return compressed(weights, f"{kind}-pack-quantized", make)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3)  # over 12, and with signs


def bitsandbytes(kind: str = "nf4", double: bool = False, block: int = 64, storage: str = "uint8") -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        count = outputs * inputs
        signed = NF4 if kind == "nf4" else [sign * value / 12 for sign in (1, -1) for value in FP4]
        meanings, codes = np.array(signed, np.float32), random.integers(0, 16, count)
        blocks = -(-count // block)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "float16", "shape": [outputs, inputs],
        }  # fmt: skip
        tensors: dict[str, Array] = {
            "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8).view(storage)[:, np.newaxis],
            "weight.quant_map": meanings,
            "weight.absmax": ((random.random(blocks) + 0.5) / 16).astype(np.float32),
        }
        scales = tensors["weight.absmax"]
        if double:
            small = random.integers(0, 256, blocks)
            table = np.sort(random.random(256) * 2 - 1).astype(np.float32)
            largest = (random.random(-(-blocks // 256)) / 16).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
            tensors |= {
                "weight.absmax": small.astype(np.uint8),
                "weight.nested_quant_map": table,
                "weight.nested_absmax": largest,
            }
            scales = table[small] * largest[np.arange(blocks) // 256] + np.float32(0.125)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text
        return tensors, (meanings[codes] * scales[np.arange(count) // block]).reshape(outputs, inputs)

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}, make)


def llm_int8() -> Format:
    def make(random: Random, outputs: int, inputs: int) -> Layer:
        codes = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
        largest = (random.random(outputs, np.float32) + np.float32(0.5)) / np.float32(4)
        tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
        return tensors, codes * (largest / np.float32(127))[:, np.newaxis]

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, make)


FORMATS: dict[str, Format] = {
    **{f"gptq-{bits}": gptq(bits, desc_act=bits % 2 == 0) for bits in (2, 3, 4, 8)},
    "gptq-3-order": gptq(3, desc_act=True),
    "gptq-channels": gptq(group=-1, sym=True),
    "gptq-v2": gptq(8, stored="gptq_v2"),
    "gptq-v2-said-v1": gptq(sym=True, stored="gptq_v2", checkpoint_format="gptq"),
    "gptq-v1-said-v2": gptq(8, sym=True, stored="gptq", checkpoint_format="gptq_v2"),
    "awq": awq(),
    "awq-channels": awq(-1),
    "awq-some": replace(
        awq(), config={**awq().config, "modules_to_not_convert": ["self_attn"]}, dense=(".self_attn.",)
    ),
    "packed-4": packed(),
    "packed-8-channels": packed(8, None),
    "packed-4-zeros": packed(symmetric=False),
    "packed-8-zeros-order": packed(8, symmetric=False, actorder=True),
    "packed-4-order": packed(actorder=True),
    "packed-3": packed(3),
    "packed-3-whole-zeros-order": packed(3, symmetric=False, actorder=True, words=whole_words),
    "packed-5-whole": packed(5, words=whole_words),
    "packed-6-zeros-order": packed(6, symmetric=False, actorder=True),
    "packed-7-whole-zeros": packed(7, symmetric=False, words=whole_words),
    "int8": int8(),
    "int8-zeros": int8(symmetric=False),
    "int8-tensor": int8(scale="tensor"),
    **{f"e4m3-{strategy}": e4m3(strategy) for strategy in ("tensor", "channel", "block")},
    "fp8": fp8(),
    "fp8-tensor": fp8(None, "weight_scale"),
    "mxfp4": fp4("mxfp4"),
    "nvfp4": fp4("nvfp4"),
    "nf4": bitsandbytes(),
    "nf4-double": bitsandbytes(double=True, block=128),  # whose last block of blocks is not full
    "nf4-in-floats": bitsandbytes(storage="float32"),
    "fp4-rest": bitsandbytes("fp4", double=True, block=4096),  # whose last block is not full
    "llm-int8": llm_int8(),
}


def mxfp4_experts(random: Random, name: str, experts: int, outputs: int, inputs: int) -> Layer:
    """A stack of experts' matrices `name`, and the weights `[E, N, K]`."""
    codes = random.integers(0, 16, (experts, outputs, inputs // 32, 16, 2))
    exponents = random.integers(118, 124, (experts, outputs, inputs // 32))
    values = np.array([*E2M1, *(-value for value in E2M1)], np.float32)[codes].reshape(experts, outputs, -1, 32)
    tensors: dict[str, Array] = {
        f"{name}_blocks": (codes[..., 0] | codes[..., 1] << 4).astype(np.uint8),
        f"{name}_scales": exponents.astype(np.uint8),
    }
    scales = np.float32(2.0) ** (exponents - 127).astype(np.float32)
    return tensors, (values * scales[..., np.newaxis]).reshape(experts, outputs, inputs)


MXFP4: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    """A model folder of that config and those tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
