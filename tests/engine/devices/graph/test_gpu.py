"""A real GPU of NVIDIA or AMD gives what the reference gives. Without one these tests are skipped."""

from __future__ import annotations

import dataclasses

import models_zoo
import pytest
import torch
from engine.devices.graph.served import FEW_BUCKETS, reference, serve, storm
from engine.devices.graph.test_flex_attention import attended_and_gathered, launch_of
from engine.devices.made_models import PLAIN, SLOPES
from engine.weights.stored_tensors import KINDS, stored
from harness import Harness, check_greedy

from engine.devices.graph import loading, served
from tidewheel.engine.devices.graph.accelerators import cuda, rocm
from tidewheel.engine.devices.graph.attention import Context
from tidewheel.engine.devices.graph.grouped import Grouped
from tidewheel.engine.devices.grouping import grouped
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.models.spec import AttentionSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MAKE_DEVICE = cuda if torch.version.hip is None else rocm
BLOCK_SIZE = 128
HEADS_OF_64 = dataclasses.replace(PLAIN, head_dim=64, scale=0.125)
HEADS_OF_128 = dataclasses.replace(PLAIN, num_heads=8, head_dim=128, scale=128**-0.5)


@pytest.mark.parametrize(
    ("spec", "lengths", "query_len"),
    [
        (HEADS_OF_64, [(0, 140), (0, 33)], 256),
        (HEADS_OF_64, [(700, 1), (127, 1), (128, 1), (0, 1)], 1),
        (HEADS_OF_128, [(0, 500)], 512),
        (HEADS_OF_128, [(1000, 1), (15, 1)], 1),
        (HEADS_OF_128, [(300, 100), (10, 128)], 128),
        (PLAIN, [(200, 1), (3, 1)], 1),
        (dataclasses.replace(PLAIN, head_dim=8), [(0, 140)], 256),
        (dataclasses.replace(HEADS_OF_64, sliding_window=150, softcap=3.0), [(500, 30)], 32),
        (dataclasses.replace(HEADS_OF_64, sliding_window=150), [(500, 1), (100, 1)], 1),
        (dataclasses.replace(HEADS_OF_64, sinks=True, alibi_slopes=SLOPES), [(0, 200), (0, 5)], 256),
        (dataclasses.replace(HEADS_OF_64, sinks=True), [(300, 1), (5, 1)], 1),
    ],
    ids=[
        *("prompts-64", "decodes-64", "prompt-128", "decodes-128", "chunks-128", "heads-of-40", "heads-of-8"),
        *("window-softcap", "window-decodes", "sinks-alibi", "sinks-decodes"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_attention_gives_what_gathering_gives(
    spec: AttentionSpec, lengths: list[tuple[int, int]], query_len: int, dtype: torch.dtype
) -> None:
    made = launch_of(lengths, query_len, width=10, spec=spec, block_size=BLOCK_SIZE)
    plan = [tensor.cuda() for tensor in made.plan]
    keys, values = made.keys.to("cuda", dtype), made.values.to("cuda", dtype)
    context = Context(made.positions.cuda(), made.tables.cuda(), keys, values, plan)
    attended, expected = attended_and_gathered(context, spec, BLOCK_SIZE)
    tolerance = 2e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(attended[:-1].float(), expected[:-1].float(), atol=tolerance, rtol=tolerance)
    assert attended.isfinite().all()


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_a_storm_gives_the_reference_tokens(enforce_eager: bool) -> None:
    options = dataclasses.replace(FEW_BUCKETS, enforce_eager=enforce_eager)
    device = MAKE_DEVICE(options, MemoryOptions(gpu_memory_utilization=0.1))
    executor = served.load(device, num_blocks=64)
    assert serve(executor, storm()) == reference("torch", "float32")
    stats = executor.stats()
    assert (stats.num_outside, stats.num_compilations) == (0, 0)
    executor.close()


@pytest.mark.parametrize("name", models_zoo.swept(models_zoo.CASES))
def test_greedy_tokens_and_logits_are_those_of_transformers(name: str) -> None:
    executor = loading.load(
        models_zoo.folder(name),
        make_device=MAKE_DEVICE,
        memory=MemoryOptions(gpu_memory_utilization=0.1),
        kv_cache_bytes=None,
    )
    check_greedy(name, Harness(executor).generate(models_zoo.prompts(), 32, chunk=7))
    executor.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_products_with_quantized_weights_are_those_of_the_dequantized_ones(kind: str, num_tokens: int) -> None:
    matrix = grouped(stored(kind, (320, 1024), kind))
    kept = Grouped(matrix, torch.bfloat16, torch.device("cuda"))
    x = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    weights = torch.from_numpy(matrix.dequantize()).to("cuda", torch.bfloat16)
    expected = torch.nn.functional.linear(x, weights)
    torch.testing.assert_close(kept.multiply(x).float(), expected.float(), atol=5e-2, rtol=2e-2)
