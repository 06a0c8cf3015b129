"""FlexAttention over pages gives what gathering them gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from engine.devices.graph.served import FEW_BUCKETS, load, serve, storm
from engine.devices.made_models import PLAIN, ROPE, SLOPES, decoder

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.graph.attention import AttentionLayer, Context, gather_attention
from tidewheel.engine.devices.graph.cpu import CpuAdapter
from tidewheel.engine.devices.graph.flex_attention import paged_flex_attention, plan_flex_attention
from tidewheel.engine.models.spec import AttentionSpec

BLOCK_SIZE = 16
SPEC = dataclasses.replace(PLAIN, head_dim=32)


def launch_of(
    lengths: list[tuple[int, int]], query_len: int, width: int, spec: AttentionSpec = SPEC, block_size: int = BLOCK_SIZE
) -> Context:
    """Sequences with `(context, new tokens)`, padded, in blocks out of order; what is in no sequence is NaN."""
    random = torch.Generator().manual_seed(0)
    num_blocks = 1 + sum(-(-sum(length) // block_size) for length in lengths)
    free = iter((1 + torch.randperm(num_blocks - 1, generator=random)).tolist())
    keys, values = torch.randn((2, num_blocks * block_size, spec.num_kv_heads, spec.head_dim), generator=random)
    tables = torch.zeros((len(lengths) + 1, width), dtype=torch.long)
    positions = torch.zeros((len(lengths) + 1, query_len), dtype=torch.long)
    keys[:block_size], values[:block_size] = 0.5, 0.5  # the padding block; the last sequence lies in it
    for row, (context, new) in enumerate(lengths):
        end = context + new
        for column in range(-(-end // block_size)):
            tables[row, column] = next(free)
        used = int(tables[row, (end - 1) // block_size]) * block_size + (end - 1) % block_size
        stop = (used // block_size + 1) * block_size
        keys[used + 1 : stop], values[used + 1 : stop] = math.nan, math.nan
        positions[row] = (context + torch.arange(query_len)).clamp(max=end - 1)
    plan = plan_flex_attention(positions, tables, block_size, num_blocks, spec.sliding_window)
    return Context(positions, tables, keys, values, plan)


def attended_and_gathered(
    context: Context, spec: AttentionSpec, block_size: int, backend: str = "inductor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What compiled attention and gathering make of random queries on the context's device."""
    device = context.keys.device
    slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device)
    sinks = torch.linspace(-1, 1, spec.num_heads, device=device) if spec.sinks else None
    layer = AttentionLayer(spec, block_size, slopes, sinks)
    random = torch.Generator().manual_seed(1)
    q = torch.randn((*context.positions.shape, spec.num_heads, spec.head_dim), generator=random).to(context.keys)
    attend = torch.compile(
        lambda q: paged_flex_attention(q, context, layer), fullgraph=True, dynamic=False, backend=backend
    )
    with torch.inference_mode():
        return attend(q), gather_attention(q, context, layer)


# Torch's compiler takes half a minute for an attention on the CPU, and compiles no sinks there: they need the logarithm
# of the softmax's sum.
@pytest.mark.parametrize(
    ("backend", "spec", "lengths", "query_len"),
    [
        ("eager", SPEC, [(0, 40), (0, 33)], 48),
        ("eager", SPEC, [(70, 1), (15, 1), (0, 1)], 1),
        pytest.param("inductor", SPEC, [(0, 40), (0, 33)], 48, marks=pytest.mark.sweep),
        pytest.param("inductor", SPEC, [(70, 1), (15, 1), (0, 1)], 1, marks=pytest.mark.sweep),
        ("eager", SPEC, [(0, 150)], 160),
        ("eager", dataclasses.replace(SPEC, sliding_window=20, softcap=3.0), [(100, 30)], 32),
        ("eager", dataclasses.replace(SPEC, sinks=True, alibi_slopes=SLOPES), [(0, 20), (0, 5)], 20),
    ],
    ids=["prompts", "decodes", "compiled prompts", "compiled decodes", "long", "window", "alibi"],
)
def test_it_gives_what_gathering_gives(
    backend: str, spec: AttentionSpec, lengths: list[tuple[int, int]], query_len: int
) -> None:
    context = launch_of(lengths, query_len, width=10, spec=spec)
    attended, expected = attended_and_gathered(context, spec, BLOCK_SIZE, backend)
    torch.testing.assert_close(attended[:-1], expected[:-1], atol=1e-4, rtol=1e-4)
    assert attended.isfinite().all()


# Torch compiles a layer for each of two buckets.
def test_a_layer_is_compiled_once_for_a_bucket_and_gives_the_reference_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    spec = decoder(*[dataclasses.replace(PLAIN, rope=ROPE)] * 2)
    expected = serve(load(get_device("torch"), spec=spec), storm()[:2])
    monkeypatch.setattr(CpuAdapter, "attend", staticmethod(paged_flex_attention))
    monkeypatch.setattr(CpuAdapter, "plan_attention", staticmethod(plan_flex_attention))
    monkeypatch.setattr(CpuAdapter, "compiles_only_layers", True)
    monkeypatch.setattr(CpuAdapter, "compile", lambda self, f: torch.compile(f, fullgraph=True, backend=backend))
    options = dataclasses.replace(
        FEW_BUCKETS,
        prompt_bs_bucket_max=1,
        prompt_seq_bucket_min=96,
        decode_bs_bucket_min=4,
    )
    executor = load(get_device("graph-cpu", [options]), spec=spec, num_blocks=32)
    num_compiled = len(graphs)
    assert serve(executor, storm()[:2]) == expected
    assert num_compiled == len(graphs) == len({use.bucket for use in executor.stats().uses})
