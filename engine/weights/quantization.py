"""Weights in fewer bits: quantized while they are loaded, multiplied with activations quantized to int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ModelError

Method = Literal["int8", "int8-channel", "int4"]

GROUP_SIZES = (32, 64, 128)
_SCALE_BITS, _ZERO_POINT_BITS = 16, 8


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are stored.

    `int8` keeps a scale for every 32 inputs of an output and quantizes activations likewise, in groups of 32.
    `int8-channel` keeps one scale an output, and one a token for the activations; the MLP's last matrix, whose inputs
    have outliers, and embedding and head are as in int8. `int4` keeps a scale, and with `zero_points` also a zero
    point, for every `group_size` inputs; its embedding and head are int8, its activations are quantized as for int8.
    """

    method: Method
    group_size: int = 32
    zero_points: bool = False

    def __str__(self) -> str:
        if self.method != "int4":
            return self.method
        return f"int4 in groups of {self.group_size}{' with zero points' if self.zero_points else ''}"

    @property
    def bytes_per_parameter(self) -> float:
        """About what a parameter takes, scales included."""
        bits = 4 if self.method == "int4" else 8
        overhead = _SCALE_BITS + (_ZERO_POINT_BITS if self.zero_points else 0)
        return (bits + (0 if self.method == "int8-channel" else overhead / self.group_size)) / 8

    @property
    def embedding_bytes_per_parameter(self) -> float:
        """What a parameter of embedding and head takes, scales included: they are int8 whatever the method."""
        return Quantization("int8").bytes_per_parameter


def parse_quantization(
    method: str | None, group_size: int | None = None, zero_points: bool = False
) -> Quantization | None:
    """What the options ask for; None is no quantization. Raises ModelError, naming what does not go together."""
    methods = get_args(Method)
    if method is not None and method not in methods:
        raise ModelError(f"quantization must be one of {', '.join(methods)}, got {method!r}")
    if method != "int4" and (group_size is not None or zero_points):
        option = "--quantization-group-size" if group_size is not None else "--quantization-zero-points"
        raise ModelError(f"{option} goes with --quantization int4 only")
    if method is None:
        return None
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ModelError(f"quantization groups must be of 32, 64 or 128, got {group_size}")
    return Quantization(method, group_size or 32, zero_points)  # type: ignore[arg-type]
