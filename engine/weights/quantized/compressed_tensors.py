"""compressed-tensors checkpoints (https://github.com/neuralmagic/compressed-tensors), as llm-compressor writes them.

Layers are dense, or stored in one of these ways. `weight_scale` is as fine as the config's strategy says.

- packed integers: `weight_packed [N, K * b / 32]`, lowest bits first, holds q + 2^(b-1); `weight_shape [2]`; where
  the zero point is not 0, `weight_zero_point [N * b / 32, G]`, packed along N with the same offset; where inputs have
  an order of their own, `weight_g_idx [K]`, each input's group.
- int8 in `weight [N, K]`, with `weight_zero_point [N, G]` where it is not 0.
- e4m3 in `weight [N, K]`.
- e2m1 in `weight_packed [N, K / 2]`: MXFP4 with powers of two for each 32 inputs, NVFP4 with scales in e4m3 for each
  16, and `weight_global_scale [1]`, by which they are divided.

A weight is its scale times (q - zero point). Activations are not rounded, which `input_activations` is about.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...errors import ModelError
from ...files.wording import shown
from ...models.config import ConfigReader
from ..bits import unpack
from ..stored import FLOATS, StoredMatrix
from ..tensor import DenseTensor, QuantizedTensor, WeightTensor, to_float32
from .fp8 import read_block
from .groups import input_order, no_codes, read_group_size, reordered
from .layer import LayerTensors
from .small_floats import E4M3, e2m1, e8m0, read_e4m3, say_that_memory_grows, scaled, take_scales

logger = logging.getLogger(__name__)

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
_PACKED_BITS: dict[int, Literal[2, 4, 8]] = {2: 2, 4: 4, 8: 8}  # others were packed in two ways
_FP4_GROUP = {"nvfp4": 16, "mxfp4": 32}  # inputs


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
    works = "packed integers of 2, 4 and 8 bits; int8; FP8 for tensors, channels, groups and blocks; MXFP4; NVFP4"
    refused = "sparse checkpoints; transforms"

    def __init__(self, config: ConfigReader) -> None:
        _check_format(config.raw("format"))
        config.refuse("transform_config", {})
        sparsity = config.raw("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise ModelError(
                f"config.json: sparsity_config = {shown(sparsity)} is not supported; take a dense checkpoint"
            )
        if config.raw("kv_cache_scheme") is not None:
            logger.info("The checkpoint's kv_cache_scheme has no effect: --kv-cache-dtype says how K and V are kept")
        self._targets = list(_read_targets(config))
        if any(scheme.type == "float" for _, scheme in self._targets):
            say_that_memory_grows(self.name)

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
    bits = _PACKED_BITS.get(scheme.bits)
    if bits is None:
        raise layer.error("weight_packed", f"has {scheme.bits} bits a weight; supported are 2, 4 and 8")
    outputs, words = layer.take("weight_packed", "I32").shape
    layer.take("weight_shape", "I32", "I64", shape=(2,))
    shape = (outputs, int(layer.array("weight_shape")[1]))
    inputs = shape[1]
    if int(layer.array("weight_shape")[0]) != outputs or inputs < 1 or -(-inputs * bits // 32) != words:
        stated = tuple(layer.array("weight_shape").tolist())
        raise layer.error("weight_shape", f"says {stated}, which {bits} bits in {outputs} x {words} words are not")
    block = take_scales(layer, "weight_scale", shape, _block_of(layer, scheme))
    group_size = block[1]
    groups = -(-inputs // group_size)
    if not scheme.symmetric:
        layer.take("weight_zero_point", "I32", shape=(-(-outputs * bits // 32), groups))
    if layer.find("weight_g_idx") is not None:
        layer.take("weight_g_idx", "I32", "I64", shape=(inputs,))

    def read(with_codes: bool) -> QuantizedTensor:
        order = None
        # Layers without an order of their own may have been saved with -1 for "not set".
        if layer.find("weight_g_idx") is not None and (layer.array("weight_g_idx") != -1).any():
            order = input_order(layer, "weight_g_idx", inputs, group_size)
        codes = no_codes(shape, bits)
        if with_codes:
            packed = np.ascontiguousarray(layer.array("weight_packed")).view(np.uint8)
            codes = reordered(packed[:, : codes.shape[1]], bits, order)
        zeros = np.full((outputs, groups), 1 << (bits - 1), np.uint8)
        if not scheme.symmetric:
            packed_zeros = np.ascontiguousarray(layer.array("weight_zero_point").T).view(np.uint8)
            zeros = unpack(packed_zeros, bits, outputs).T
        return QuantizedTensor(
            shape,
            "uint",
            bits,
            group_size,
            codes,
            _scales(layer, outputs, groups),
            zeros,
            order,
            layer.origin("weight_packed"),
        )

    return layer.integers(shape, (scheme, block), read)


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
    return layer.matrix(shape, (scheme, block), lambda: read_e4m3(layer, "weight", "weight_scale", shape, block))


def _fp4(layer: LayerTensors, scheme: _Scheme) -> StoredMatrix:
    if scheme.bits != 4:
        raise layer.error("weight_packed", f"has packed floats of {scheme.bits} bits; supported are 4")
    outputs, pairs = layer.take("weight_packed", "U8").shape
    shape, kind = (outputs, 2 * pairs), "mxfp4" if layer.find("weight_global_scale") is None else "nvfp4"
    group = _FP4_GROUP[kind]
    layer.take("weight_scale", "U8" if kind == "mxfp4" else "F8_E4M3", shape=(outputs, -(-2 * pairs // group)))
    if kind == "nvfp4":
        found = layer.find("weight_global_scale")
        layer.take("weight_global_scale", *FLOATS, shape=() if found is not None and found.shape == () else (1,))

    def read() -> WeightTensor:
        codes = layer.array("weight_scale")
        scales = e8m0(codes) if kind == "mxfp4" else E4M3[codes]
        if kind == "nvfp4":
            divisor = to_float32(layer.floats("weight_global_scale"))
            if not divisor.all():
                raise layer.error("weight_global_scale", "is 0, by which nothing can be divided")
            scales = scales / divisor
        values = e2m1(layer.array("weight_packed"), shape[1])
        return scaled(values, scales, (1, group), layer.origin("weight_packed"))

    return layer.matrix(shape, (scheme, kind), read)


def _scales(layer: LayerTensors, outputs: int, groups: int) -> DenseTensor:
    """The scales as `[N, G]`, where there may be one in all."""
    scales = layer.floats("weight_scale")
    numbers = scales.data.reshape(-1, groups) if scales.data.size == outputs * groups else scales.data.reshape(1, 1)
    return DenseTensor(np.broadcast_to(numbers, (outputs, groups)), scales.dtype, origin=scales.origin)


def _block_of(layer: LayerTensors, scheme: _Scheme) -> tuple[int, int] | None:
    if scheme.block is not None and scheme.block[0] != 1:
        raise layer.error("weight_scale", "is for blocks, which are supported for float-quantized layers only")
    return scheme.block


def _check_format(found: object) -> None:
    if found is not None and found not in _FORMATS:
        raise ModelError(
            f"config.json: compressed-tensors' format {shown(found)} is not supported; "
            f"supported are {', '.join(_FORMATS)}"
        )


def _read_targets(config: ConfigReader) -> Iterator[tuple[re.Pattern[str] | str, _Scheme]]:
    """Each target of the config's groups, a pattern of layers' names, a name or a class, with its scheme."""
    groups = config.raw("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise config.error("config_groups", "an object of groups of layers")
    for name, group in groups.items():
        owner = f"config.json: config_groups.{name}"
        _check_format(group.get("format"))
        if not isinstance(group.get("weights"), dict):
            raise ModelError(f"{owner} does not say how weights are quantized, which is all that is supported")
        scheme = _read_scheme(ConfigReader(group["weights"], f"{owner}.weights"))
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise ModelError(f"{owner}.targets must be a list of names")
        for target in targets:
            yield _pattern(target, owner) if target.startswith("re:") else target, scheme


def _pattern(target: str, owner: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{owner}: {shown(target)} is not a regular expression: {error}") from None


def _names(target: re.Pattern[str] | str, layer: str) -> bool:
    return layer == target if isinstance(target, str) else target.match(layer) is not None


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
