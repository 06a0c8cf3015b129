"""Quantized weights and caches: how far they move the embedded model, what they cost, and what is refused."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import models_zoo
import numpy as np
import pytest
from harness import Harness, device_ids, load, make_device
from numpy.typing import NDArray
from samples import sample, swept

from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.weights.dtypes import DType, KvCacheDType
from tidewheel.engine.weights.dummy import DummyWeights
from tidewheel.engine.weights.quantization import Method, Quantization, TensorFormat, format_of, parse_quantization
from tidewheel.server.options.model import DEMO_MODEL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tidewheel._native") is None, reason="needs the native extension"
)

_DEMO = Path(DEMO_MODEL)
_PROMPT_TOKENS = 192

# Mean Kullback-Leibler divergence from float32, in nats a token, that each may have.
BOUNDS = [
    (Quantization("int8"), 0.001),
    (Quantization("int4"), 0.03),
    (Quantization("q8_0"), 0.001),
    (Quantization("int8-channel"), 0.001),
    (Quantization("int4-fast"), 0.05),
    (Quantization("int4-fast", zero_points=True), 0.05),
    (Quantization("int4-fast", 64), 0.06),
    (Quantization("int4-fast", 128), 0.07),
    (Quantization("int4-fast", 128, zero_points=True), 0.07),
]
# `make test` has the formats of whole rows, groups of 32 as they are, and groups of 128 with zero points.
SWEPT = BOUNDS[5:8]
# The same of what K and V are cached as, beside weights in bfloat16.
KV_BOUNDS: list[tuple[KvCacheDType, float]] = [
    ("fp8_e5m2", 0.02),
    ("fp8_e4m3", 0.006),
    ("int8", 0.001),
    ("int4", 0.04),
]


@functools.cache
def conversations() -> list[list[int]]:
    """Held-out conversations of every skill that the demo model has, as tokens."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))  # the scripts are not part of the installed package
    from demo_model import corpus
    from demo_model.chat import spans

    tokenizer = Tokenizer.load(_DEMO)
    items = corpus.held_out_set(7, 2)
    return [tokenizer.encode("".join(text for text, _ in spans(item)))[:_PROMPT_TOKENS] for item in items]


def log_probabilities(
    dtype: DType, quantization: Quantization | None, kv_cache_dtype: KvCacheDType | None = None
) -> NDArray[np.float64]:
    """Log-probabilities of every next token after every token of the conversations, [tokens, vocabulary]."""
    executor = load(
        make_device(device_ids()[1]), _DEMO, dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    values = np.concatenate([Harness(executor).logits(tokens) for tokens in conversations()]).astype(np.float64)
    executor.close()
    values -= values.max(axis=1, keepdims=True)
    normalized: NDArray[np.float64] = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return normalized


@functools.cache
def reference() -> NDArray[np.float64]:
    return log_probabilities("float32", None)


@pytest.mark.parametrize(
    ("quantization", "bound"),
    [pytest.param(*case, marks=pytest.mark.sweep if case in SWEPT else ()) for case in BOUNDS],
    ids=str,
)
def test_divergence_of_the_embedded_model(quantization: Quantization, bound: float) -> None:
    exact, quantized = reference(), log_probabilities("bfloat16", quantization)
    divergence = (np.exp(exact) * (exact - quantized)).sum(axis=1)
    assert bound / 100 < divergence.mean() < bound


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), sample(KV_BOUNDS, lambda case: case[0] in ("fp8_e4m3", "int4")))
def test_divergence_by_what_k_and_v_are_cached_as(kv_cache_dtype: KvCacheDType, bound: float) -> None:
    exact, rounded = reference(), log_probabilities("bfloat16", None, kv_cache_dtype)
    divergence = (np.exp(exact) * (exact - rounded)).sum(axis=1)
    assert bound / 100 < divergence.mean() < bound


def test_bits_are_saved() -> None:
    sizes = {}
    for quantization in (None, Quantization("int8"), Quantization("int8-channel"), Quantization("int4-fast")):
        executor = load(make_device(device_ids()[1]), _DEMO, "bfloat16", quantization=quantization)
        sizes[quantization] = executor.native.weight_bytes  # type: ignore[attr-defined]
        executor.close()
    plain = sizes.pop(None)
    for quantization, size in sizes.items():
        # The small model's norms and scales weigh, and its embedding stays int8.
        assert size < plain * ((4.5 if quantization.method == "int4-fast" else 8.5) / 16 + 0.07)


# No dimension is padded: rows are whole panels, inputs whole groups.
UNPADDED = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "attention_bias": True, "tie_word_embeddings": False,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"], "vocab_size": 512, "hidden_size": 512, "ffn_dim": 1024,
        "num_hidden_layers": 1, "num_attention_heads": 8, "max_position_embeddings": 62, "word_embed_proj_dim": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", UNPADDED)
@pytest.mark.parametrize("quantization", [None, *(quantization for quantization, _ in BOUNDS)], ids=str)
@pytest.mark.parametrize("dtype", [swept("float32"), "bfloat16", swept("float16")])
def test_the_formats_are_those_that_the_cpu_packs(family: str, quantization: Quantization | None, dtype: DType) -> None:
    spec = describe(UNPADDED[family]).spec
    options = ExecutorOptions(
        dtype=dtype, kv_cache_bytes=2**20, max_model_len=16, max_num_seqs=1, max_num_batched_tokens=16,
        quantization=quantization,
    )  # fmt: skip
    executor = make_device("cpu").load(spec, DummyWeights(spec, dtype), options)
    shapes = tensor_shapes(spec).items()
    layers = len(spec.layers)
    formats = ((format_of(name, shape, dtype, quantization, num_layers=layers), shape) for name, shape in shapes)
    estimate = sum(format.num_bytes(shape) for format, shape in formats)
    packed = executor.native.weight_bytes  # type: ignore[attr-defined]
    if quantization is not None and quantization.method == "int4":  # the kernels keep some scales in more bits
        assert estimate < packed < 1.01 * estimate
    else:
        assert packed == estimate
    executor.close()


Q4_K, Q6_K = TensorFormat("q4_k"), TensorFormat("q6_k")
INT8, CHANNEL, INT4 = TensorFormat("int8"), TensorFormat("int8-channel"), TensorFormat("int4", 64, True)


@pytest.mark.parametrize(
    ("quantization", "formats"),
    [
        (None, {"layers": TensorFormat("float16"), "down": TensorFormat("float16"), "embed": TensorFormat("float16")}),
        (Quantization("int8"), {"layers": INT8, "down": INT8, "embed": INT8}),
        (Quantization("int8-channel"), {"layers": CHANNEL, "down": INT8, "embed": INT8}),
        (Quantization("q4_k_m"), {"layers": Q4_K, "down": Q4_K, "embed": Q6_K}),
        (Quantization("int4-fast", 64, True), {"layers": INT4, "down": INT4, "embed": INT8}),
    ],
    ids=str,
)
def test_each_weight_has_a_format(quantization: Quantization | None, formats: dict[str, TensorFormat]) -> None:
    expected = {
        **dict.fromkeys(["embed.weight", "head.weight"], formats["embed"]),
        **dict.fromkeys(["embed.project_in.weight", "embed.project_out.weight"], formats["layers"]),
        **dict.fromkeys([f"layers.3.{name}.weight" for name in ("q", "k", "v", "o", "gate", "up")], formats["layers"]),
        "layers.3.down.weight": formats["down"],
        "embed.positions": TensorFormat("float16"),
    }
    assert {
        name: format_of(name, (64, 256), "float16", quantization, num_layers=16, tied=True) for name in expected
    } == expected
    for name in ("final_norm.weight", "layers.3.down.bias", "layers.3.q_norm.weight"):
        assert format_of(name, (64,), "float16", quantization) == TensorFormat("float32")


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "opt-350m", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["int8", "int8-channel", "int4", "int4-fast"])
def test_every_family_is_near_its_own_float32(family: str, method: Method) -> None:
    folder = models_zoo.folder(family)
    device = make_device(device_ids()[1])
    outputs = []
    for quantization in (None, parse_quantization(method)):
        executor = load(device, folder, "float32", quantization=quantization)
        outputs.append(Harness(executor).logits(list(range(5, 45))))
        executor.close()
    exact, quantized = outputs
    error = np.linalg.norm(quantized - exact) / np.linalg.norm(exact)
    assert 0 < error < (0.7 if method in ("int4", "int4-fast") else 0.12)  # tiny random models magnify errors


def test_torch_refuses_by_name() -> None:
    with pytest.raises(DeviceError, match="--quantization"):
        load(make_device("torch"), _DEMO, quantization=Quantization("int8"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("int4", 64), "--quantization-group-size goes with --quantization int4-fast"),
        (("int4-fast", 48), "32, 64 or 128"),
        (("int8", 64), "--quantization-group-size"),
        ((None, 64), "--quantization-group-size"),
        (("int8", None, True), "--quantization-zero-points"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[Method | None, int | None, bool], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_quantization(*arguments)
