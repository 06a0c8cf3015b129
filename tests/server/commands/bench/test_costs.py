"""The counts of `tidewheel bench`, against counts by hand, transformers' own arithmetic, and memory that was taken."""

from __future__ import annotations

import math
from typing import Any

import models_zoo
import pytest
from model_configs import CONFIGS

from tidewheel.engine.devices.cache_split import GroupBytes
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec, LatentAttentionSpec, mixers, tensor_shapes
from tidewheel.engine.options import EngineOptions
from tidewheel.server.commands.bench.costs import Costs
from tidewheel.server.commands.bench.model import tensor_bytes

pytest.importorskip("tidewheel._native")

PANEL = 32  # rows of a matrix that lie together in memory


def shape(**changes: Any) -> DecoderSpec:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip
    return describe({**config, **changes}).spec


def sizes(spec: DecoderSpec) -> dict[str, int]:
    return {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}


def costs_of(
    spec: DecoderSpec, bytes_per_parameter: int = 2, kv_bytes: int = 48, head_bytes_per_parameter: int | None = None
) -> Costs:
    """As if nothing were padded, with the same KV bytes a token for each cache group."""
    num_bytes = {name: size * bytes_per_parameter for name, size in sizes(spec).items()}
    for name in ("embed.weight", "head.weight"):
        if name in num_bytes and head_bytes_per_parameter is not None:
            num_bytes[name] = sizes(spec)[name] * head_bytes_per_parameter
    groups = [GroupBytes(window, kv_bytes) for window in spec.windows()]
    return Costs(spec, tensor_bytes=num_bytes, weight_bytes=sum(num_bytes.values()), kv_groups=groups)


LAYER = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 24
NORMS = 3 * 16 + 8


@pytest.mark.parametrize("tied", [True, False])
def test_flops(tied: bool) -> None:
    # Tokens at positions 5 and 6 attend to 6 and 7 tokens, with 4 heads of 2 dimensions in 3 layers.
    flops = costs_of(shape(tie_word_embeddings=tied)).flops(5, 2, 1)
    assert flops == 2 * (2 * 3 * LAYER + 50 * 8) + 4 * (6 + 7) * 4 * 2 * 3


def test_bytes_of_a_decode_step() -> None:
    weights = 2 * (3 * LAYER + NORMS + 50 * 8)
    tied = costs_of(shape())
    assert tied.decode_bytes(10, 1, 5) == weights + 5 * 11 * 48
    assert tied.decode_bytes(10, 2, 5) == 2 * weights + 5 * (11 + 12) * 48
    untied = costs_of(shape(tie_word_embeddings=False))
    assert untied.decode_bytes(10, 1, 5) == tied.decode_bytes(10, 1, 5)  # the embedding is looked up, not read


def test_the_kernels_do_what_the_model_does() -> None:
    costs = costs_of(shape())
    decode = costs.decode_kernels(10, 2, 5)
    assert list(decode) == ["qkv", "out", "up", "down", "head", "attention"]
    assert sum(work.flops for work in decode.values()) == 5 * costs.flops(10, 2, 2)
    assert sum(work.num_bytes or 0 for work in decode.values()) == costs.decode_bytes(10, 2, 5) - 2 * 2 * NORMS
    assert decode["up"].flops == 2 * (2 * 8 * 24 * 3) * 2 * 5
    prefill = costs.prefill_kernels(4, 6, steps=3)
    assert sum(work.flops for work in prefill.values()) == 4 * costs.flops(0, 6, 1)
    assert prefill["qkv"].num_bytes == 3 * 2 * 3 * (8 * 8 + 2 * 4 * 8)
    assert prefill["attention"].num_bytes is None


def test_an_embedding_in_another_format_than_the_rest() -> None:
    body, embedding = 3 * LAYER + NORMS, 50 * 8
    for tied in (True, False):
        costs = costs_of(shape(tie_word_embeddings=tied), 1, head_bytes_per_parameter=4)
        assert costs.decode_bytes(10, 1, 1) == body + 4 * embedding + 11 * 48
        work = costs.decode_kernels(10, 1, 1)
        assert (work["head"].num_bytes, work["down"].num_bytes) == (4 * embedding, 3 * 8 * 24)


def test_a_sliding_window_bounds_both() -> None:
    costs = costs_of(shape(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=4), 0)
    assert costs.decode_bytes(10, 1, 1) == 4 * 48
    assert costs.flops(0, 6, 0) == 2 * 6 * 3 * LAYER + 4 * (1 + 2 + 3 + 4 + 4 + 4) * 4 * 2 * 3


def test_experts_are_read_if_a_token_chose_them() -> None:
    spec = describe({**CONFIGS["OlmoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}).spec
    size = sizes(spec)
    expert = sum(n for name, n in size.items() if name.startswith("layers.0.experts.3."))
    experts = 8 * expert * len(spec.layers)
    rest = sum(size.values()) - experts - size["embed.weight"]
    costs = costs_of(spec, kv_bytes=0)
    for tokens, part in ((1, 2 / 8), (2, 2 / 8 + 6 / 8 * 2 / 8), (1000, 1)):
        assert costs.decode_bytes(0, 1, tokens) == pytest.approx(2 * (rest + part * experts))
    prefill, step = costs.prefill_kernels(1, 6, steps=3), costs.decode_kernels(0, 1, 2)
    assert prefill["up"].num_bytes == pytest.approx(3 * (step["up"].num_bytes or 0))
    assert costs.flops(0, 1, 0) == pytest.approx(
        2 * (2 * expert + 4 * 64 * 64 + 8 * 64) * len(spec.layers) + 4 * 64 * len(spec.layers)
    )


def test_state_is_read_and_written() -> None:
    spec = describe(CONFIGS["Qwen3NextForCausalLM"]).spec
    costs = costs_of(spec, kv_bytes=0)
    assert costs.decode_bytes(9, 2, 3) - costs.decode_bytes(9, 2, 1) == 2 * 2 * 2 * spec.state_bytes
    kernels = costs.decode_kernels(9, 1, 1)
    state = sum(net.num_value_heads * net.key_dim * net.value_dim for net in spec.recurrences())  # type: ignore[union-attr]
    assert kernels["recurrence"].flops == 7 * state
    assert kernels["recurrence"].num_bytes == 2 * 4 * state
    taps = kernels["convolution"]
    assert taps.num_bytes == 2 * (spec.state_bytes - 4 * state) + taps.flops  # 2 FLOPs and 2 bytes for each weight


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_every_matrix_belongs_to_a_kernel(architecture: str) -> None:
    spec = describe(CONFIGS[architecture]).spec
    weights = costs_of(spec).weights
    counted = sum(sum(read.parameters.values()) for read in (weights.always, *weights.routed.values()))
    looked_up = {"embed.weight", "embed.positions", "embed.per_layer"} - ({"embed.weight"} if spec.head.tied else set())
    shapes = tensor_shapes(spec)
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in looked_up)
    convolutions = sum(
        math.prod(shape) for name, shape in shapes.items() if name.endswith(("conv.weight", "taps.weight"))
    )
    assert counted == matrices + convolutions


@pytest.mark.parametrize("name", models_zoo.swept())
def test_bytes_are_those_that_loading_takes(name: str) -> None:
    """Read and looked up together, all experts chosen; with no more beside them than matrices are padded by."""
    pytest.importorskip("transformers")
    opened = open_model(EngineOptions(model=str(models_zoo.folder(name)), device="cpu"))
    spec, counted = opened.spec, tensor_bytes(opened)
    executor: Any = opened.load(
        EngineOptions(model=name),
        kv_cache_bytes=64 * opened.kv_bytes_per_token + 8 * opened.slot_bytes,
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=16,
    )
    taken = executor.native.weight_bytes
    executor.close()
    assert sum(counted.values()) == opened.weight_bytes <= taken <= sum(_padded(spec, counted).values())
    weights = Costs(spec, tensor_bytes=counted, weight_bytes=taken, kv_groups=opened.kv_groups).weights
    assert weights.all_bytes(10_000) + weights.looked_up_bytes == pytest.approx(taken)


def _padded(spec: DecoderSpec, counted: dict[str, int]) -> dict[str, float]:
    heads = next((m.num_heads for layer in spec.layers for m in mixers(layer) if isinstance(m, LatentAttentionSpec)), 1)
    padded = {}
    for name, (rows, *columns) in tensor_shapes(spec).items():
        parts = heads if name.endswith(("k_up.weight", "v_up.weight")) else 1  # each head begins a panel
        factor = parts * math.ceil(rows / parts / PANEL) * PANEL / rows
        factor *= math.prod(math.ceil(size / PANEL) * PANEL / size for size in columns)
        padded[name] = counted[name] * factor
    return padded


# Without families whose recurrence transformers computes in another way, and whose heads see latents.
@pytest.mark.parametrize(
    "name", ["llama-tied", "opt-350m", "gemma4", "qwen2-moe", "olmoe", "gpt-oss", "granitemoe", "ernie4-5-moe"]
)
def test_flops_are_those_that_transformers_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model = models_zoo.model(name)
    spec = open_model(EngineOptions(model=str(models_zoo.folder(name)), device="cpu")).spec
    before = model.config._experts_implementation if hasattr(model.config, "_experts_implementation") else None
    if before is not None:
        model.set_experts_implementation("eager")
    try:
        with torch.no_grad(), FlopCounterMode(display=False, depth=8) as counter:
            model(torch.tensor([[7]]), use_cache=False)
    finally:
        if before is not None:
            model.set_experts_implementation(before)
    counts = counter.get_flop_counts()
    ropes = sum(sum(ops.values()) for module, ops in counts.items() if module.split(".")[-1].startswith("rotary_emb"))
    assert costs_of(spec).flops(0, 1, 1) == counter.get_total_flops() - ropes
