"""Figures and tables laid out for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .spread import Spread


def figure(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: Spread, unit: float = 1.0) -> str:
    """The median, and the least and the most if they are others; all divided by `unit`."""
    median, least, most = (figure(value / unit) for value in (values.median, values.min, values.max))
    return median if least == most else f"{median} ({least}..{most})"


def share(fraction: float | None) -> str:
    """A fraction with two decimals; a dash for what is not known."""
    return "-" if fraction is None else f"{fraction:.2f}"


def size(num_bytes: int) -> str:
    """An amount of memory."""
    return f"{num_bytes / 1e6:.0f} MB"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair a line."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "".join(f"{name:{width}}  {value}\n" for name, value in pairs)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, flush right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"  {line}\n" for line in lines)
