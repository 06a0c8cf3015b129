"""Runs the kernel of grouped matrices in Triton's interpreter, and prints the largest error of each case as JSON.

A process of its own: Triton decides when it is imported whether it interprets (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys

import torch
from engine.weights.stored_tensors import stored

from tidewheel.engine.devices.graph.grouped import Grouped
from tidewheel.engine.devices.graph.kernels import grouped_matmul
from tidewheel.engine.devices.grouped_weights import joined
from tidewheel.engine.devices.grouping import grouped

_NUM_MATRICES = 3


def error_of(kind: str, dtype: torch.dtype, num_tokens: int, inputs: int, blocks: list[int] | None) -> float:
    """The largest difference from products with the dequantized weights, beside the largest product."""
    parts = [
        grouped(stored(kind, (24, inputs), f"{kind} {number}")) for number in range(_NUM_MATRICES if blocks else 2)
    ]
    matrix = joined([part if part.input_order is None else parts[0] for part in parts])
    weights = torch.from_numpy(matrix.dequantize()).to(dtype)
    kept = Grouped(matrix, dtype, torch.device("cpu"))
    kept._kernels = grouped_matmul  # as on a GPU
    torch.manual_seed(1)
    if blocks is None:
        x = torch.randn(num_tokens, inputs).to(dtype)
        computed, expected = kept.multiply(x), torch.nn.functional.linear(x, weights)
    else:
        x = torch.randn(len(blocks), num_tokens, inputs).to(dtype)
        chosen = torch.tensor(blocks)
        used = torch.tensor([len(blocks) - 1])
        computed = kept.multiply_blocks(x, chosen, used, _NUM_MATRICES)
        expected = torch.bmm(x, weights.view(_NUM_MATRICES, 24, inputs)[chosen].mT)
        assert not computed[used:].any()
        computed, expected = computed[:used], expected[:used]
    return float((computed - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([error_of(kind, getattr(torch, dtype), *rest) for kind, dtype, *rest in cases]))
