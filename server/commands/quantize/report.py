"""The report for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tidewheel.engine.files.wording import in_bytes
from tidewheel.engine.quantizing.report import Report, TensorReport

from ..bench import text


def render(report: Report, out: str) -> str:
    """A line for each format, the matrices that stayed as they were, and the whole."""
    by_format: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        by_format.setdefault(tensor.format, []).append(tensor)
    ordered = sorted(by_format.items(), key=lambda item: -sum(tensor.num_bytes for tensor in item[1]))
    rows = [["format", "tensors", "size", "error"]]
    rows += [[name, str(len(tensors)), in_bytes(_bytes(tensors)), _error(tensors)] for name, tensors in ordered]
    weights = sum(math.prod(tensor.shape) for tensor in report.tensors)
    notes = Counter(_noted(tensor) for tensor in report.tensors if tensor.note)
    lines = [f"{count} {'matrix' if count == 1 else 'matrices'} {note}\n" for note, count in notes.items()]
    whole = f"{out}: {in_bytes(report.num_bytes)}, {report.num_bytes * 8 / weights:.2f} bits a weight\n"
    return text.table(rows) + "".join(lines) + whole


def _noted(tensor: TensorReport) -> str:
    return f"{'left as stored' if tensor.error is None else 'quantized all the same'}: {tensor.note}"


def _bytes(tensors: Sequence[TensorReport]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _error(tensors: Sequence[TensorReport]) -> str:
    """The root of the mean of their squared errors; each weighs as much as it has weights."""
    known = [(tensor.error, math.prod(tensor.shape)) for tensor in tensors if tensor.error is not None]
    if not known:
        return "-"
    mean = sum(error**2 * weights for error, weights in known) / sum(weights for _, weights in known)
    return f"{100 * math.sqrt(mean):.2f} %"
