"""Runs the kernel of experts in Triton's interpreter, and prints the largest error of each case as JSON.

A process of its own: Triton decides when it is imported whether it interprets (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys

import torch

from tidewheel.engine.devices.graph.kernels.experts import multiply_experts


def error_of(dtype: torch.dtype, size: int) -> float:
    """Of blocks of `size` rows, the last one unused: the largest difference, beside the largest product."""
    torch.manual_seed(1)
    x, matrices = torch.randn(3, size, 136).to(dtype), torch.randn(5, 72, 136).to(dtype)
    experts = torch.tensor([4, 0, 2])
    found = torch.compile(multiply_experts, backend="eager", fullgraph=True)(x, matrices, experts, torch.tensor([2]))
    expected = torch.bmm(x, matrices[experts].mT)
    return float((found - expected)[:2].abs().max() / expected.abs().max())


if __name__ == "__main__":
    print(json.dumps([error_of(getattr(torch, dtype), size) for dtype, size in json.loads(sys.argv[1])]))
