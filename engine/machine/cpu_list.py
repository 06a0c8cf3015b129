"""Lists of processors as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def cpu_list(cpus: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2,5`, the format of `--threads-bind`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
