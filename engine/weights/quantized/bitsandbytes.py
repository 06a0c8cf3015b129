"""bitsandbytes checkpoints: NF4 and FP4 (QLoRA, https://arxiv.org/abs/2305.14314), and LLM.int8()
(https://arxiv.org/abs/2208.07339), as transformers saves them.

A layer `[N, K]` of 4 bits: `weight`, the N * K codes one after the other, two a byte, the first in the high nibble, as
whatever number type `bnb_4bit_quant_storage` names; `weight.quant_map [16]`, what each code means; `weight.absmax`, the
scale of each block of codes; and `weight.quant_state.bitsandbytes__nf4` (or fp4), JSON in bytes with the shape and the
size of blocks. A weight is `quant_map[code] * absmax`. With double quantization `absmax` is codes of 8 bits itself: a
scale is `nested_quant_map[code] * nested_absmax + nested_offset`.

A layer of 8 bits: `weight [N, K]` of int8 and `SCB [N]`, the largest number of each output, which 127 stands for.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...files.wording import shown
from ...models.config import ConfigReader
from ..quantization import TensorFormat
from ..small_floats import ScaleCodes, SmallFloatTensor
from ..stored import StoredMatrix, StoredTensor
from ..tensor import DenseTensor, QuantizedTensor, to_float32
from .groups import no_codes
from .layer import LayerTensors

logger = logging.getLogger(__name__)

_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
_STORAGE = ("U8", "I8", "F16", "BF16", "F32", "F64")
_BLOCKS = tuple(32 << i for i in range(8))  # sizes that the authors' kernels have
_MAX_STATE_BYTES = 1 << 12
_ROWS = 0  # weight_format of int8 that is not arranged for one processor


@dataclass(frozen=True, slots=True)
class _State:
    """The JSON of a layer of 4 bits. The nested fields are None without double quantization."""

    shape: tuple[int, int]
    block: int
    nested_block: int | None
    nested_offset: float


class BitsAndBytes:
    """The reader of bitsandbytes layers. Their tensors tell all that matters, so the config is not looked at.

    Activations are not rounded to int8, which the config's `llm_int8_threshold` is about.
    """

    name = "bitsandbytes"
    works = "NF4 and FP4, with or without double quantization; LLM.int8()"
    refused = "int8 in a processor-specific layout"

    def __init__(self, config: ConfigReader) -> None:
        self._says_dequantized = True

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """The layer's matrix; None if the layer is not quantized."""
        states = [part for part in _STATES.values() if layer.find(part) is not None]
        if len(states) > 1:
            raise layer.error(states[1], f"and {states[0]} cannot both be there")
        if states:
            matrix, in_rows = _four_bits(layer, states[0])
            if not in_rows and self._says_dequantized:
                self._says_dequantized = False
                logger.info(
                    "%s and others like it are dequantized as they are read, because their blocks continue in the "
                    "next row",
                    layer.origin("weight"),
                )
            return matrix
        if layer.find("SCB") is not None:
            return _eight_bits(layer)
        weight = layer.find("weight")
        if weight is not None and weight.dtype in ("U8", "I8"):
            raise layer.error("weight", "is quantized, but has neither SCB nor quant_state.bitsandbytes__nf4 or __fp4")
        return None


def _four_bits(layer: LayerTensors, state_part: str) -> tuple[StoredMatrix, bool]:
    """The matrix, and whether each block is within a row, so that its codes can be kept."""
    state = _read_state(layer, state_part)
    count = math.prod(state.shape)
    weight = layer.take("weight", *_STORAGE)
    if len(weight.data) != -(-count // 2):
        raise layer.error(
            state_part, f"says {state.shape}, but tensor {layer.name}.weight has {len(weight.data)} bytes"
        )
    blocks = -(-count // state.block)
    layer.take("weight.quant_map", "F32", shape=(16,))
    if state.nested_block is None:
        layer.take("weight.absmax", "F32", shape=(blocks,))
    else:
        layer.take("weight.absmax", "U8", shape=(blocks,))
        layer.take("weight.nested_quant_map", "F32", shape=(256,))
        layer.take("weight.nested_absmax", "F32", shape=(-(-blocks // state.nested_block),))

    outputs, inputs = state.shape
    if inputs % 2 or (inputs % state.block and state.block % inputs):
        # Bytes or blocks go on in the next row: there are no groups of a row's inputs.
        return layer.matrix(state.shape, state, lambda: _dequantized(layer, weight, state)), False
    group = min(state.block, inputs)
    groups, run = count // group, _scale_run(state)

    def read() -> SmallFloatTensor:
        scales: NDArray[np.float32] | NDArray[np.uint8]
        if run:
            scales = np.asarray(layer.array("weight.absmax"), np.uint8)
        else:
            scales = np.asarray(np.repeat(_scales(layer, state), max(state.block // inputs, 1))[:groups], np.float32)
        return SmallFloatTensor(
            "table4",
            state.shape,
            group,
            weight.data.reshape(outputs, -1),
            scales.reshape(outputs, -1),
            table=tuple(_meanings(layer).tolist()),
            mapped=True,
            origin=layer.origin("weight"),
            scales_origin=layer.origin("weight.absmax"),
            scale_codes=_scale_codes(layer, state, run) if run else None,
        )

    def stored_format() -> TensorFormat:
        table = tuple(_meanings(layer).tolist())
        if not run:
            return TensorFormat("table4", group, table=table)
        return TensorFormat("table4", group, table=table, scale_table=_scale_table(layer), scale_run=run)

    return layer.small_floats(state.shape, state, read, stored_format), True


def _scale_run(state: _State) -> int:
    """How many scales of a row share a nested one, so that their codes can be kept; 0 if that would take no less."""
    inputs = state.shape[1]
    if state.nested_block is None or state.block > inputs:
        return 0
    groups = inputs // state.block
    run = math.gcd(groups, state.nested_block)
    code_bytes, float_bytes = 1, 4
    return run if groups * code_bytes + (groups // run + 1) * float_bytes < groups * float_bytes else 0


def _scale_table(layer: LayerTensors) -> tuple[float, ...]:
    return tuple(_finite(layer, "weight.nested_quant_map").tolist())


def _scale_codes(layer: LayerTensors, state: _State, run: int) -> ScaleCodes:
    outputs, inputs = state.shape
    assert state.nested_block is not None
    runs = inputs // state.block // run
    nested = np.arange(outputs * runs) * run // state.nested_block
    largest = _nested_scales(layer, state)[nested].reshape(outputs, runs)
    return ScaleCodes(_scale_table(layer), run, largest, np.full(outputs, state.nested_offset, np.float32))


def _meanings(layer: LayerTensors) -> NDArray[np.float32]:
    return _finite(layer, "weight.quant_map")


def _dequantized(layer: LayerTensors, weight: StoredTensor, state: _State) -> DenseTensor:
    codes, count = np.arange(256), math.prod(state.shape)
    pairs = _meanings(layer)[np.stack([codes >> 4, codes & 15], axis=1)]  # of each byte
    values = pairs[weight.data].reshape(-1)[:count]
    scales = _scales(layer, state)
    whole = count // state.block
    with np.errstate(over="ignore"):  # what is not finite is found as in every other weight
        full, rest = values[: whole * state.block].reshape(whole, state.block), values[whole * state.block :]
        full *= scales[:whole, np.newaxis]
        rest *= scales[whole:]
    return DenseTensor(values.reshape(state.shape), "float32", origin=layer.origin("weight"))


def _scales(layer: LayerTensors, state: _State) -> NDArray[np.float32]:
    if state.nested_block is None:
        _finite(layer, "weight.absmax")
        return np.asarray(layer.scales("weight.absmax").data, np.float32)
    meanings, largest = _finite(layer, "weight.nested_quant_map"), _nested_scales(layer, state)
    codes = layer.array("weight.absmax")
    group_size = min(state.nested_block, len(codes))
    with np.errstate(over="ignore"):
        scales = meanings[codes] * np.repeat(largest, group_size)[: len(codes)]
        return np.asarray(scales + np.float32(state.nested_offset), np.float32)


def _nested_scales(layer: LayerTensors, state: _State) -> NDArray[np.float32]:
    """The scales of the codes of scales. They may all be 0 where all scales are the offset, unless that is 0 too."""
    largest = _finite(layer, "weight.nested_absmax")
    if state.nested_offset == 0 and not largest.any():
        raise layer.only_zeros("weight.nested_absmax")
    return largest


def _eight_bits(layer: LayerTensors) -> StoredMatrix:
    outputs, inputs = layer.take("weight", "I8").shape
    layer.take("SCB", "F32", shape=(outputs,))
    if layer.find("weight_format") is not None:
        layer.take("weight_format", "U8", shape=())
        if layer.array("weight_format") != _ROWS:
            raise layer.error(
                "weight_format", "says that the weight is in a processor-specific layout: save the checkpoint again"
            )

    shape = (outputs, inputs)

    def read(with_codes: bool) -> QuantizedTensor:
        with np.errstate(invalid="ignore"):  # what is not finite is found as in every other weight
            largest = to_float32(layer.scales("SCB"))[:, np.newaxis] / np.float32(127)
        scales = DenseTensor(largest, "float32", origin=layer.origin("SCB"))
        codes = layer.array("weight").view(np.uint8) if with_codes else no_codes(shape, 8)
        return QuantizedTensor(shape, "int", 8, inputs, codes, scales, origin=layer.origin("weight"))

    return layer.integers(shape, "int8", read)


def _read_state(layer: LayerTensors, part: str) -> _State:
    found = layer.find(part)
    length = len(found.data) if found is not None else 0
    if length > _MAX_STATE_BYTES:
        raise layer.error(part, f"has {length} bytes, more than the {_MAX_STATE_BYTES} there may be")
    layer.take(part, "U8", shape=(length,))
    try:
        fields = json.loads(layer.array(part).tobytes())
    except (ValueError, RecursionError) as error:
        raise layer.error(part, "is not JSON") from error
    if not isinstance(fields, dict):
        raise layer.error(part, "is not a JSON object")
    if fields.get("quant_type") not in (None, part.rpartition("__")[2]):
        raise layer.error(part, f"says quant_type {shown(fields['quant_type'])}")
    shape = fields.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise layer.error(part, f"must have a shape of two positive integers, got {shown(shape)}")
    nested = layer.find("weight.nested_absmax") is not None
    return _State(
        (shape[0], shape[1]),
        _block(layer, part, fields, "blocksize"),
        _block(layer, part, fields, "nested_blocksize") if nested else None,
        _offset(layer, part, fields) if nested else 0.0,
    )


def _block(layer: LayerTensors, part: str, fields: dict[str, Any], name: str) -> int:
    block = fields.get(name)
    if type(block) is not int or block not in _BLOCKS:
        raise layer.error(part, f"must have a {name} of {', '.join(map(str, _BLOCKS))}, got {shown(block)}")
    return block


def _offset(layer: LayerTensors, part: str, fields: dict[str, Any]) -> float:
    offset = fields.get("nested_offset")
    if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not abs(offset) < 2.0**127:
        raise layer.error(part, f"must have a nested_offset that is a finite number, got {shown(offset)}")
    return float(offset)


def _finite(layer: LayerTensors, part: str) -> NDArray[np.float32]:
    numbers = to_float32(layer.floats(part))
    if not np.isfinite(numbers).all():
        raise layer.error(part, "has values that are not finite (infinite or NaN)")
    return numbers
