"""compressed-tensors checkpoints (https://github.com/neuralmagic/compressed-tensors), as llm-compressor writes them.

Layers are dense, or stored in one of these ways. `weight_scale` is as fine as the config's strategy says.

- packed integers of b bits: `weight_packed [N, K * b / 32]`, lowest bits first, holds q + 2^(b-1); `weight_shape
  [2]`; where the zero point is not 0, `weight_zero_point [N * b / 32, G]`, packed along N with the same offset; where
  inputs have an order of their own, `weight_g_idx [K]`, each input's group.
- int8 in `weight [N, K]`, with `weight_zero_point [N, G]` where it is not 0.
- e4m3 in `weight [N, K]`.
- e2m1 in `weight_packed [N, K / 2]`: MXFP4 with powers of two for each 32 inputs, NVFP4 with scales in e4m3 for each
  16, and `weight_global_scale [1]`, by which they are divided.

A weight is its scale times (q - zero point). `input_activations` is ignored: activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ...files.wording import shown
from ...models.config import ConfigReader
from ..bits import pack, unpack
from ..quantization import TensorFormat
from ..small_floats import MXFP4_GROUP, NVFP4_GROUP, SmallFloatTensor
from ..stored import FLOATS, StoredMatrix
from ..tensor import DenseTensor, QuantizedTensor, to_float32
from .fp8 import read_block
from .groups import input_order, no_codes, read_group_size, reordered
from .layer import LayerTensors
from .layer_patterns import LayerPattern
from .small_floats import e4m3_matrix, mxfp4, take_scales

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
# The bits that packed integers are held in, by the integers' own bits.
_HELD_BITS: dict[int, Literal[2, 3, 4, 8]] = {2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}

_MAGNITUDE = np.uint8(127)  # of the bits of e4m3, all but the sign

_Packing = Literal["dense", "whole"]


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How some layers are quantized. `block`, outputs and inputs with one scale, is None for channel and tensor."""

    bits: int
    type: str
    symmetric: bool
    block: tuple[int, int] | None


class CompressedTensors:
    """The reader of compressed-tensors layers. Raises ModelError for a config that is not supported."""

    name = "compressed-tensors"
    works = "packed integers of 2 to 8 bits; int8; FP8 for tensors, channels, groups and blocks; MXFP4; NVFP4"
    refused = "sparse checkpoints; transforms"

    def __init__(self, config: ConfigReader) -> None:
        _check_format(config.raw("format"))
        config.refuse("transform_config", {})
        sparsity = config.raw("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise ModelError(
                f"config.json: sparsity_config = {shown(sparsity)} is not supported; take a dense checkpoint"
            )
        self._targets = list(_read_targets(config))

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """The layer's matrix; None if the layer is not quantized."""
        if layer.find("weight_packed") is not None:
            scheme = self._scheme_of(layer)
            return _packed(layer, scheme) if scheme.type == "int" else _fp4(layer, scheme)
        weight = layer.find("weight")
        if weight is None or (weight.dtype in FLOATS and layer.find("weight_scale") is None):
            return None
        scheme = self._scheme_of(layer)
        return _int8(layer, scheme) if scheme.type == "int" else _fp8(layer, scheme)

    def _scheme_of(self, layer: LayerTensors) -> _Scheme:
        names = (target for target in self._targets if _names(target[0], layer.name))
        kind = "Embedding" if layer.name.endswith("embed_tokens") else "Linear"
        kinds = (target for target in self._targets if target[0] == kind)
        found = next(names, None) or next(kinds, None)
        if found is None:
            raise ModelError(f"config.json: no target of config_groups is layer {layer.name}, which is quantized")
        return found[1]


def _packed(layer: LayerTensors, scheme: _Scheme) -> StoredMatrix:
    bits = scheme.bits
    if bits not in _HELD_BITS:
        raise layer.error("weight_packed", f"has {bits} bits a weight; supported are 2 to 8")
    held = _HELD_BITS[bits]
    outputs, words = layer.take("weight_packed", "I32").shape
    layer.take("weight_shape", "I32", "I64", shape=(2,))
    shape = (outputs, int(layer.array("weight_shape")[1]))
    inputs = shape[1]
    packing = _packing(words, inputs, bits)
    if int(layer.array("weight_shape")[0]) != outputs or inputs < 1 or packing is None:
        stated = tuple(layer.array("weight_shape").tolist())
        raise layer.error("weight_shape", f"says {stated}, but {bits} bits in {outputs} x {words} words do not match")
    block = take_scales(layer, "weight_scale", shape, _block_of(layer, scheme))
    group_size = block[1]
    groups = -(-inputs // group_size)
    zeros_packing = None
    if not scheme.symmetric:
        found = layer.find("weight_zero_point")
        zeros_words = found.shape[0] if found is not None and found.shape else 0
        zeros_packing = _packing(zeros_words, outputs, bits)
        if zeros_packing is None:
            zeros_words = -(-outputs * bits // 32)
        layer.take("weight_zero_point", "I32", shape=(zeros_words, groups))
    if layer.find("weight_g_idx") is not None:
        layer.take("weight_g_idx", "I32", "I64", shape=(inputs,))

    def read(with_codes: bool) -> QuantizedTensor:
        order = None
        # Layers without an order of their own may have been saved with -1 for "not set".
        if layer.find("weight_g_idx") is not None and (layer.array("weight_g_idx") != -1).any():
            order = input_order(layer, "weight_g_idx", inputs, group_size)
        codes = no_codes(shape, held)
        if with_codes:
            packed = np.ascontiguousarray(layer.array("weight_packed")).view(np.uint8)
            if packing != "dense" or bits != held:
                packed = pack(_numbers(packed, bits, inputs, packing), held)
            codes = reordered(packed[:, : codes.shape[1]], held, order)
        zeros = np.full((outputs, groups), 1 << (bits - 1), np.uint8)
        if not scheme.symmetric:
            packed_zeros = np.ascontiguousarray(layer.array("weight_zero_point").T).view(np.uint8)
            zeros = _numbers(packed_zeros, bits, outputs, zeros_packing).T
        return QuantizedTensor(
            shape,
            "uint",
            held,
            group_size,
            codes,
            _scales(layer, outputs, groups),
            zeros,
            order,
            layer.origin("weight_packed"),
        )

    return layer.integers(shape, (scheme, block), read)


def _packing(words: int, count: int, bits: int) -> _Packing | None:
    """How `words` words hold `count` numbers of `bits` bits; None if they do not.

    The format's authors first gave each word as many whole numbers as it has room for, and since 2026 let numbers go on
    in the next word. Where that makes a difference, the number of words tells.
    """
    words_of: dict[_Packing, int] = {"dense": -(-count * bits // 32), "whole": -(-count // (32 // bits))}
    fitting = [packing for packing, needed in words_of.items() if needed == words]
    if len(fitting) == 2 and 32 % bits and words > 1:
        return None
    return fitting[0] if fitting else None


def _numbers(rows: NDArray[np.uint8], bits: int, count: int, packing: _Packing | None) -> NDArray[np.uint8]:
    """The first `count` numbers of each row of packed words, `[R, count]`."""
    if packing == "dense":
        return unpack(rows, bits, count)
    shifts = np.arange(0, 32 - bits + 1, bits, dtype=np.uint32)
    numbers = rows.view("<u4")[..., np.newaxis] >> shifts & np.uint32((1 << bits) - 1)
    return numbers.astype(np.uint8).reshape(len(rows), -1)[:, :count]


def _int8(layer: LayerTensors, scheme: _Scheme) -> StoredMatrix:
    outputs, inputs = layer.take("weight", "I8").shape
    shape = (outputs, inputs)
    block = take_scales(layer, "weight_scale", shape, _block_of(layer, scheme))
    groups = -(-inputs // block[1])
    if not scheme.symmetric:
        found = layer.find("weight_zero_point")
        zeros_shape = found.shape if found is not None and found.shape in ((), (1,)) else (outputs, groups)
        layer.take("weight_zero_point", "I8", shape=zeros_shape)

    def read(with_codes: bool) -> QuantizedTensor:
        zeros = None if scheme.symmetric else np.broadcast_to(layer.array("weight_zero_point"), (outputs, groups))
        codes = layer.array("weight").view(np.uint8) if with_codes else no_codes(shape, 8)
        scales = _scales(layer, outputs, groups)
        return QuantizedTensor(shape, "int", 8, block[1], codes, scales, zeros, origin=layer.origin("weight"))

    return layer.integers(shape, (scheme, block), read)


def _fp8(layer: LayerTensors, scheme: _Scheme) -> StoredMatrix:
    if scheme.bits != 8:
        raise layer.error("weight", f"has floats of {scheme.bits} bits; supported are 8")
    outputs, inputs = layer.take("weight", "F8_E4M3").shape
    shape = (outputs, inputs)
    block = take_scales(layer, "weight_scale", shape, scheme.block)
    return e4m3_matrix(layer, "weight", "weight_scale", shape, block, (scheme, block))


def _fp4(layer: LayerTensors, scheme: _Scheme) -> StoredMatrix:
    if scheme.bits != 4:
        raise layer.error("weight_packed", f"has packed floats of {scheme.bits} bits; supported are 4")
    return _nvfp4(layer) if layer.find("weight_global_scale") is not None else _mxfp4(layer)


def _mxfp4(layer: LayerTensors) -> StoredMatrix:
    outputs, pairs = layer.take("weight_packed", "U8").shape
    inputs, group = 2 * pairs, MXFP4_GROUP
    if inputs % group:
        raise layer.error("weight_packed", f"has {inputs} inputs, which are not groups of {group}")
    layer.take("weight_scale", "U8", shape=(outputs, inputs // group))

    def read() -> SmallFloatTensor:
        return mxfp4(layer.array("weight_packed"), layer.array("weight_scale"), layer.origin("weight_packed"))

    return layer.small_floats((outputs, inputs), "mxfp4", read, lambda: TensorFormat("mxfp4"))


def _nvfp4(layer: LayerTensors) -> StoredMatrix:
    outputs, pairs = layer.take("weight_packed", "U8").shape
    inputs, group = 2 * pairs, NVFP4_GROUP
    layer.take("weight_scale", "F8_E4M3", shape=(outputs, -(-inputs // group)))
    found = layer.find("weight_global_scale")
    layer.take("weight_global_scale", *FLOATS, shape=() if found is not None and found.shape == () else (1,))

    def read() -> SmallFloatTensor:
        divisor = to_float32(layer.floats("weight_global_scale"))
        if not divisor.all():
            raise layer.error("weight_global_scale", "is 0, which cannot be a divisor")
        scales = layer.array("weight_scale")
        if not (scales & _MAGNITUDE).any():
            raise layer.only_zeros("weight_scale")
        return SmallFloatTensor(
            "nvfp4",
            (outputs, inputs),
            group,
            layer.array("weight_packed"),
            scales,
            np.broadcast_to(divisor, outputs),
            mapped=True,
            origin=layer.origin("weight_packed"),
            scales_origin=layer.origin("weight_scale"),
        )

    return layer.small_floats((outputs, inputs), "nvfp4", read, lambda: TensorFormat("nvfp4", group))


def _scales(layer: LayerTensors, outputs: int, groups: int) -> DenseTensor:
    """The scales as `[N, G]`, where there may be one in all."""
    scales = layer.scales("weight_scale")
    numbers = scales.data.reshape(-1, groups) if scales.data.size == outputs * groups else scales.data.reshape(1, 1)
    return DenseTensor(np.broadcast_to(numbers, (outputs, groups)), scales.dtype, origin=scales.origin)


def _block_of(layer: LayerTensors, scheme: _Scheme) -> tuple[int, int] | None:
    if scheme.block is not None and scheme.block[0] != 1:
        raise layer.error("weight_scale", "is for blocks, which are supported only for float-quantized layers")
    return scheme.block


def _check_format(found: object) -> None:
    if found is not None and found not in _FORMATS:
        raise ModelError(
            f"config.json: compressed-tensors' format {shown(found)} is not supported; "
            f"supported are {', '.join(_FORMATS)}"
        )


def _read_targets(config: ConfigReader) -> Iterator[tuple[LayerPattern | str, _Scheme]]:
    """Each target of the config's groups, a pattern of layers' names, a name or a class, with its scheme."""
    groups = config.raw("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise config.error("config_groups", "an object of groups of layers")
    for name, group in groups.items():
        owner = f"config.json: config_groups.{name}"
        _check_format(group.get("format"))
        if not isinstance(group.get("weights"), dict):
            raise ModelError(f"{owner} has no quantization of weights, and only that is supported")
        scheme = _read_scheme(ConfigReader(group["weights"], f"{owner}.weights"))
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise ModelError(f"{owner}.targets must be a list of names")
        for target in targets:
            pattern = target.startswith("re:")
            yield LayerPattern(target.removeprefix("re:"), owner) if pattern else target, scheme


def _names(target: LayerPattern | str, layer: str) -> bool:
    return layer == target if isinstance(target, str) else target.matches(layer)


def _read_scheme(config: ConfigReader) -> _Scheme:
    bits, kind, strategy = config.integer("num_bits", 8), config.raw("type") or "int", config.raw("strategy")
    if kind not in ("int", "float"):
        raise config.error("type", "int or float")
    group_size = read_group_size(config)
    block: tuple[int, int] | None = None
    if strategy in ("group", "tensor_group") or (strategy is None and group_size is not None):
        block = None if group_size is None else (1, group_size)
    elif strategy == "block":
        block = read_block(config, "block_structure")
        if block is None:
            raise config.error("block_structure", "two positive integers")
    elif strategy not in ("channel", "tensor", None):
        raise config.error("strategy", "tensor, channel, group, tensor_group or block")
    return _Scheme(bits, kind, config.flag("symmetric", True), block)
