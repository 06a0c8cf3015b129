"""The bars: what Tidewheel is to reach, by kind of processor, and the figures that are held against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidewheel.server.commands.bench.text import figure


@dataclass(frozen=True)
class Figure:
    """What was measured; `detail` says of what, or beside whom."""

    value: float
    detail: str = ""


@dataclass(frozen=True)
class Bar:
    """A figure's name, and its goal: the least that it may be, or with `at_most` the most."""

    figure: str
    goal: float
    at_most: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value reaches the goal."""
        return value <= self.goal if self.at_most else value >= self.goal

    def __str__(self) -> str:
        """The goal alone, for a table."""
        return f"{'at most' if self.at_most else 'at least'} {figure(self.goal)}"


# Names of shares of a ceiling that was measured in the same run.
PREFILL, LONG_PREFILL = "prefill 4 x 512", "prefill 1 x 4096"
DECODE_1, DECODE_8, DECODE_32 = "decode 1", "decode 8", "decode 32"
LONG_DECODE = "decode 8 after 4096"

Goals = Mapping[str, Mapping[str, float]]  # by format of the weights, then by figure


def _goals(
    prefill: tuple[float, float, float],
    decode: tuple[float, float, float],
    long: tuple[float, float],
) -> Goals:
    """Of prefill in bfloat16, int8 and int4; of decode 1, 8 and 32; of 4096 tokens in prefill and decode."""
    one, eight, many = decode
    for_all = {DECODE_1: one, DECODE_8: eight}
    bfloat16, int8, int4 = prefill
    return {
        "bfloat16": {PREFILL: bfloat16, **for_all},
        "int8": {PREFILL: int8, LONG_PREFILL: long[0], **for_all, DECODE_32: many, LONG_DECODE: long[1]},
        "int4-fast": {PREFILL: int4, **for_all},
    }


@dataclass(frozen=True)
class Column:
    """A kind of processor. Its goals are for an instruction set level, and for one vendor's processors if it says so.

    `vendor` is that of `/proc/cpuinfo`.
    """

    name: str
    level: str
    goals: Goals
    vendor: str | None = None


COLUMNS = (
    Column("Intel with AMX", "amx", {"bfloat16": {PREFILL: 0.5}, "int8": {PREFILL: 0.5}}),
    Column(
        "AMD with AVX512-BF16",
        "avx512_bf16",
        _goals(prefill=(0.88, 0.66, 0.64), decode=(0.92, 0.8, 0.52), long=(0.58, 0.88)),
        vendor="AuthenticAMD",
    ),
    Column(
        "Intel with AVX-512 and VNNI",
        "avx512_vnni",
        _goals(prefill=(0.85, 0.58, 0.5), decode=(0.88, 0.75, 0.48), long=(0.42, 0.8)),
        vendor="GenuineIntel",
    ),
    Column("AVX2", "avx2", _goals(prefill=(0.85, 0.55, 0.75), decode=(0.9, 0.7, 0.5), long=(0.5, 0.8))),
)
