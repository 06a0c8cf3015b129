"""GPTQ checkpoints (https://arxiv.org/abs/2210.17323), as AutoGPTQ and GPTQModel write them.

A layer `[N, K]` of b bits in G groups: `qweight [K * b / 32, N]`, each column one bit string with the first input in
its lowest bits; `qzeros [G, N * b / 32]`, packed along N in the same way; `scales [G, N]`; `g_idx [K]`, each input's
group. A weight is `scale * (q - zero)`. The format `gptq` stores zeros less one, and `gptq_v2` as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ...files.wording import shown
from ...models.config import ConfigReader
from ..bits import unpack
from ..stored import FLOATS, StoredMatrix
from ..tensor import DenseTensor, QuantizedTensor
from .groups import input_order, no_codes, read_group_size, reordered, reordered_words
from .layer import LayerTensors
from .layer_patterns import LayerPattern


@dataclass(frozen=True, slots=True)
class _Scheme:
    bits: Literal[2, 3, 4, 8]
    group_size: int | None
    symmetric: bool


class Gptq:
    """The reader of GPTQ layers. Raises ModelError for a config that is not supported."""

    name = "gptq"
    works = (
        "2, 3, 4 and 8 bits; any group size or whole columns; symmetric or not; `desc_act`; `dynamic`; "
        "formats `gptq` and `gptq_v2`"
    )
    refused = "kernel-specific formats, such as Marlin's"

    def __init__(self, config: ConfigReader) -> None:
        config.refuse("is_marlin_format", False)
        config.refuse("pack_dtype", "int32")
        formats = [config.raw(name) for name in ("checkpoint_format", "format") if config.raw(name) is not None]
        for found in formats:
            if found not in ("gptq", "gptq_v2"):
                raise ModelError(
                    f"config.json: GPTQ's format {shown(found)} is not supported; supported are gptq and gptq_v2. "
                    "Take a checkpoint that was saved in one of them"
                )
        self._zeros_less_one = "gptq_v2" not in formats
        self._scheme = _read_scheme(config)
        self._dynamic = list(_read_dynamic(config))

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """The layer's matrix; None if the layer is not quantized."""
        scheme = self._scheme_of(layer.name)
        if scheme is None or layer.find("qweight") is None:
            return None
        bits = scheme.bits
        words, outputs = layer.take("qweight", "I32").shape
        inputs = words * 32 // bits
        if words * 32 % bits:
            raise layer.error("qweight", f"has {words} rows, which {bits} bits an input cannot fill")
        group_size = scheme.group_size or inputs
        groups = -(-inputs // group_size)
        layer.take("scales", *FLOATS, shape=(groups, outputs))
        layer.take("qzeros", "I32", shape=(groups, -(-outputs * bits // 32)))
        if layer.find("g_idx") is not None:
            layer.take("g_idx", "I32", "I64", shape=(inputs,))
        facts = (self.name, scheme, self._zeros_less_one)
        shape = (outputs, inputs)
        return layer.integers(shape, facts, lambda codes: self._read(layer, scheme, shape, group_size, codes))

    def _scheme_of(self, layer: str) -> _Scheme | None:
        for pattern, scheme in self._dynamic:
            if pattern.matches(layer):
                return scheme
        return self._scheme

    def _read(
        self, layer: LayerTensors, scheme: _Scheme, shape: tuple[int, int], group_size: int, with_codes: bool
    ) -> QuantizedTensor:
        order = None if layer.find("g_idx") is None else input_order(layer, "g_idx", shape[1], group_size)
        codes = no_codes(shape, scheme.bits)
        if with_codes:
            words = layer.array("qweight")
            if order is None or 32 % scheme.bits:
                codes = reordered(np.ascontiguousarray(words.T).view(np.uint8), scheme.bits, order)
            else:
                words = reordered_words(words, scheme.bits, order)
                codes = np.ascontiguousarray(words.T).view(np.uint8)
        zeros = unpack(layer.array("qzeros").view(np.uint8), scheme.bits, shape[0])
        scales = layer.scales("scales")
        return QuantizedTensor(
            shape,
            "uint",
            scheme.bits,
            group_size,
            codes,
            DenseTensor(scales.data.T, scales.dtype, origin=scales.origin),
            self._zeros(zeros, scheme).T,
            order,
            layer.origin("qweight"),
        )

    def _zeros(self, stored: NDArray[np.uint8], scheme: _Scheme) -> NDArray[np.uint8]:
        middle, less_one = 1 << (scheme.bits - 1), self._zeros_less_one
        # Some checkpoints name the one format and are stored in the other. Zeros of symmetric ones tell which it is.
        if scheme.symmetric and stored.min() == stored.max() and stored.flat[0] in (middle - 1, middle):
            less_one = stored.flat[0] != middle
        # A zero of 0, less one, was stored as the largest number.
        return stored + np.uint8(1) & np.uint8((1 << scheme.bits) - 1) if less_one else stored


def _read_scheme(config: ConfigReader, default: _Scheme | None = None) -> _Scheme:
    bits: Any = config.raw("bits") if default is None or "bits" in config else default.bits
    if bits not in (2, 3, 4, 8) or isinstance(bits, (bool, float)):
        raise config.error("bits", "2, 3, 4 or 8 for GPTQ")
    same_groups = default is not None and "group_size" not in config
    group_size = default.group_size if default and same_groups else read_group_size(config)
    return _Scheme(bits, group_size, config.flag("sym", default.symmetric if default else True))


def _read_dynamic(config: ConfigReader) -> Iterator[tuple[LayerPattern, _Scheme | None]]:
    """Patterns of layers' names, and the scheme of layers that match; None: none. The first match decides."""
    dynamic = config.raw("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise config.error("dynamic", "an object from patterns to settings")
    default = _read_scheme(config)
    for pattern, fields in dynamic.items():
        if not isinstance(fields, dict):
            raise config.error("dynamic", "an object from patterns to settings")
        owner = f"config.json: dynamic {shown(pattern)}"
        layers = LayerPattern(pattern.removeprefix("+:").removeprefix("-:"), "config.json: dynamic")
        yield layers, None if pattern.startswith("-:") else _read_scheme(ConfigReader(fields, owner), default)
