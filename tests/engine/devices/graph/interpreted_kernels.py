"""Runs kernels in Triton's interpreter, and prints the largest error of each case as JSON.

A process of its own: Triton decides when it is imported whether it interprets (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from tidewheel.engine.devices.graph.attention import AttentionLayer, Context, gather_attention
from tidewheel.engine.devices.graph.gpu_attention import gpu_attention, latent_attention
from tidewheel.engine.models.spec import AttentionSpec

KERNELS = "tidewheel.engine.devices.graph.kernels"
PAGE, NUM_PAGES, WIDTH = 32, 20, 5


def of_experts(dtype: str, size: int) -> float:
    """Of blocks of `size` rows, the last one unused."""
    multiply = import_module(f"{KERNELS}.experts").multiply_experts
    x, matrices = torch.randn(3, size, 136).to(getattr(torch, dtype)), torch.randn(5, 72, 136).to(getattr(torch, dtype))
    experts = torch.tensor([4, 0, 2])
    found = torch.compile(multiply, backend="eager", fullgraph=True)(x, matrices, experts, torch.tensor([2]))
    expected = torch.bmm(x, matrices[experts].mT)
    return _error(found[:2], expected[:2])


def of_decodes(dtype: str, heads: int, kv_heads: int, key_dim: int, value_dim: int | None, fields: Any) -> float:
    """Of sequences of 1, 71 and 160 tokens. What nothing sees is NaN. With a `value_dim` values are parts of keys."""
    slopes = fields.get("alibi_slopes")
    spec = AttentionSpec(
        heads, kv_heads, key_dim, key_dim**-0.5, **{**fields, "alibi_slopes": slopes and tuple(slopes)}
    )
    keys = torch.randn(NUM_PAGES * PAGE, kv_heads, key_dim).to(getattr(torch, dtype))
    values = torch.randn_like(keys) if value_dim is None else keys[..., :value_dim]
    tables = torch.randperm(NUM_PAGES)[: 3 * WIDTH].view(3, WIDTH)
    positions = torch.tensor([[0], [70], [159]])
    seen = torch.zeros(NUM_PAGES * PAGE, dtype=torch.bool)
    for table, position in zip(tables, positions[:, 0].tolist(), strict=True):
        first = max(0, position - (spec.sliding_window or position + 1) + 1)
        for at in range(first, position + 1):
            seen[table[at // PAGE] * PAGE + at % PAGE] = True
    for cached in (keys, values):
        cached[~seen] = torch.nan
    q = torch.randn(3, 1, heads, key_dim).to(keys.dtype)
    sinks = torch.randn(heads) if spec.sinks else None
    layer = AttentionLayer(spec, PAGE, None if slopes is None else torch.tensor(slopes), sinks)
    kernels = import_module(f"{KERNELS}.decode_attention")
    with patch("tidewheel.engine.devices.graph.gpu_attention.kernels_of", return_value=kernels):
        attend = (gpu_attention if value_dim is None else latent_attention)(q.device, PAGE)
    attend = torch.compile(attend, backend="eager", fullgraph=True)
    found = attend(q, Context(positions, tables, keys, values), layer)
    clean = Context(positions, tables, keys.float().nan_to_num(), values.float().nan_to_num())
    return _error(found, gather_attention(q.float(), clean, layer))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    torch.manual_seed(1)
    cases = {"experts": of_experts, "decodes": of_decodes}
    print(json.dumps([cases[name](*arguments) for name, *arguments in json.loads(sys.argv[1])]))
