"""Floats of 8 and 4 bits (https://arxiv.org/abs/2209.05433, OCP Microscaling Formats v1.0), and matrices of them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..declaring.record import record
from .bits import unpack
from .quantization import SmallFloat, TensorFormat


def _e4m3_values() -> NDArray[np.float32]:
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan  # there is no infinity
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3_values()
"""What each of the 256 codes of e4m3 (without infinities) means."""

NVFP4_GROUP = 16  # inputs
MXFP4_GROUP = 32
_E8M0 = np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What each of the 16 codes of e2m1 means."""


@record(frozen=True, slots=True)
class ScaleCodes:
    """The scales of a matrix as codes of 8 bits, `[N, groups]`. They mean `table[code] * largest + offset`, in float32.
    `largest [N, groups / run]` is for `run` groups of a row, and `offsets [N]` for a row.
    """

    table: tuple[float, ...]
    run: int
    largest: NDArray[np.float32]
    offsets: NDArray[np.float32]

    def scales(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The scales, `[N, groups]`."""
        products = np.array(self.table, np.float32)[codes] * np.repeat(self.largest, self.run, axis=1)
        return np.asarray(products + self.offsets[:, np.newaxis], np.float32)


@record(frozen=True, slots=True)
class SmallFloatTensor:
    """A matrix `[N, K]` of small floats, with a scale for each group of a row's inputs. A weight is its scale times

    - `e4m3`: the float that its byte of `codes [N, K]` is;
    - `nvfp4`, `mxfp4`: the float (e2m1) of four bits of `codes [N, K / 2]`, where the first of two is in the low half;
    - `table4`: the number of `table` that four bits of `codes [N, ceil(K / 2)]` name, the first in the high half.

    `scales [N, ceil(K / group_size)]` are float32. nvfp4's are bytes of e4m3, which are divided by `divisors [N]
    float32`, and mxfp4's are bytes of powers of two (e8m0). table4's are bytes if there are
    `scale_codes`. `mapped` says of the codes what it says in DenseTensor. `origin` and `scales_origin` name file and
    tensor.

    Raises ValueError for arrays that do not fit together.
    """

    kind: SmallFloat | Literal["mxfp4"]
    shape: tuple[int, int]
    group_size: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32] | NDArray[np.uint8]
    divisors: NDArray[np.float32] | None = None
    table: tuple[float, ...] | None = None
    mapped: bool = False
    origin: str | None = None
    scales_origin: str | None = None
    scale_codes: ScaleCodes | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        width = inputs if self.kind == "e4m3" else -(-inputs // 2)
        groups = (outputs, -(-inputs // self.group_size))
        if self.codes.shape != (outputs, width) or self.scales.shape != groups:
            raise ValueError(f"codes of {self.codes.shape} and scales of {self.scales.shape} are not {self.shape}")
        if (self.divisors is not None) != (self.kind == "nvfp4") or (self.table is not None) != (self.kind == "table4"):
            raise ValueError(f"divisors are for nvfp4 and a table is for table4, not for {self.kind}")
        if (codes := self.scale_codes) is not None and (
            self.table is None
            or codes.largest.shape != (outputs, groups[1] // codes.run)
            or groups[1] % codes.run
            or codes.offsets.shape != (outputs,)
        ):
            raise ValueError(f"codes of scales in runs of {codes.run} do not fit scales of {groups}")

    @property
    def stored_format(self) -> TensorFormat:
        """The format that a device may keep it in. Codes and scales are not looked at."""
        if self.kind == "mxfp4":
            return TensorFormat("mxfp4")
        group, codes = min(self.group_size, self.shape[1]), self.scale_codes
        if codes is None:
            return TensorFormat(self.kind, group, table=self.table)
        return TensorFormat(self.kind, group, table=self.table, scale_table=codes.table, scale_run=codes.run)

    def dequantize(self) -> NDArray[np.float32]:
        """The weights, `[N, K]`: the reference for all kernels that compute with the codes."""
        outputs, inputs = self.shape
        values = self._floats()
        size = min(self.group_size, inputs)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found as in every other weight
            scales = self.float_scales()
            if inputs % size:
                values *= np.repeat(scales, size, axis=1)[:, :inputs]
            else:
                values.reshape(outputs, -1, size)[:] *= scales[..., np.newaxis]
        return values

    def float_scales(self) -> NDArray[np.float32]:
        """The scales as numbers, `[N, groups]`."""
        if self.scale_codes is not None:
            return self.scale_codes.scales(np.asarray(self.scales, np.uint8))
        if self.kind == "mxfp4":
            return np.asarray(_E8M0[self.scales], np.float32)
        if self.divisors is not None:
            return np.asarray(E4M3[self.scales] / self.divisors[:, np.newaxis], np.float32)
        return self.scales.astype(np.float32)

    def _floats(self) -> NDArray[np.float32]:
        inputs = self.shape[1]
        if self.kind == "e4m3":
            return np.asarray(E4M3[self.codes], np.float32)
        if self.kind in ("nvfp4", "mxfp4"):
            return np.asarray(E2M1[unpack(self.codes, 4, inputs)], np.float32)
        halves = np.stack([self.codes >> 4, self.codes & 15], axis=-1).reshape(self.shape[0], -1)[:, :inputs]
        return np.array(self.table, np.float32)[halves]
