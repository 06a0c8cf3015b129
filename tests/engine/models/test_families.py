"""Every family on every device computes what transformers computes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import jax_processors
import models_zoo
import numpy as np
import pytest
from harness import Harness, check_greedy, device_ids, load, make_device, over_devices
from optional_packages import require_packages
from samples import sample

from tidewheel.engine.devices.base import Device
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.weights.dtypes import DType, KvCacheDType

torch = pytest.importorskip("torch")
require_packages("transformers")

OUTPUT_TOKENS = {"torch": 8, "tpu": 16}
CHUNK = {"tpu": 2}
# One token, and prompts that end within a block, at its end and behind it. The torch device takes its time, and each
# token alone whatever is beside it.
PROMPT_LENGTHS = (1, 5, 16, 17, 48)
TORCH_PROMPT_LENGTHS = (1, 17, 48)

# For every ISA level: windows with caps, ALiBi, sinks and clipped experts, latents, and each kind of recurrence.
OF_LEVELS = ("gemma2", "mpt", "gpt-oss", "deepseek-v3", "qwen3_5-experts", "falcon-h1", "lfm2")
# For torch, each kind of layer, and what is around them.
OF_TORCH = (*OF_LEVELS, "gemma3n", "opt-350m", "phi3-longrope", "cohere2")
# Windows, two ropes, projections around the layers, residual blocks side by side, ALiBi, long contexts, streams with
# per-layer embeddings, and latents. All that families need of a layer is in test_specs.py.
OF_GRAPHS = (
    "mistral-window", "gemma3", "opt-350m", "cohere2", "mpt", "gpt2-scaled", "phi3-longrope", "gemma3n", "deepseek-v3",
)  # fmt: skip
# Each model takes seconds to compile. These have windows with two ropes, and latents and experts.
OF_TPUS = ("gemma3", "deepseek-v3")


def on(device: str, names: Iterable[str], chosen: Container[str]) -> list[Any]:
    """Parameters of a test: the device with each model. `make test` has those that are chosen."""
    return sample([(device, name) for name in names], lambda case: case[1] in chosen)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with jax_processors.asked_for() if request.param == "tpu" else nullcontext():
        yield make_device(request.param)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompts_for(device: Device) -> list[list[int]]:
    lengths = TORCH_PROMPT_LENGTHS if device.name == "torch" else PROMPT_LENGTHS
    return [prompt for prompt in models_zoo.prompts() if len(prompt) in lengths]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *over_devices(models_zoo.CASES, levels=OF_LEVELS, torch=OF_TORCH),
        *on("graph", models_zoo.CASES, OF_GRAPHS),
        *on("tpu", models_zoo.CASES, OF_TPUS),
    ],
    indirect=["device"],
)
def test_greedy_tokens_and_logits_are_those_of_transformers(device: Device, name: str) -> None:
    executor = load(device, models_zoo.folder(name))
    num_tokens, chunk = OUTPUT_TOKENS.get(device.name, 24), CHUNK.get(device.name, 7)
    # Two programs of torch's products, in float32 both: on a Zen 5, gemma4's logits were 1.01e-4 apart.
    max_error = 2e-4 if device.name == "torch" else 1e-4
    check_greedy(name, Harness(executor).generate(prompts_for(device), num_tokens, chunk), max_error=max_error)
    executor.close()


# With a length to serve, the schemes that depend on it use their extended tables, as transformers does past the
# training length.
LONG = [
    ("llama", 230, None),
    ("mistral-window", 230, None),
    ("qwen2-window", 230, None),
    ("opt", 230, None),
    ("gpt2", 256, None),
    ("llama-linear", 300, None),
    ("llama-dynamic", 230, None),
    ("llama-dynamic", 400, 400),
    ("llama-longrope", 120, None),
    ("llama-longrope", 230, 256),
    ("gemma3", 230, None),
    ("phi3-longrope", 120, None),
    ("phi3-longrope", 230, 256),
    ("cohere2", 230, None),
    ("mpt", 256, None),
]


@pytest.mark.parametrize(
    ("device", "name", "length", "max_model_len"),
    [
        *over_devices(LONG, levels=("gemma3", "mpt"), torch=("llama-longrope", "gemma3")),
        *(("graph", *case) for case in LONG if case[0] in models_zoo.EVERYWHERE),
    ],
    indirect=["device"],
)
def test_logits_over_long_contexts(device: Device, name: str, length: int, max_model_len: int | None) -> None:
    executor = load(device, models_zoo.folder(name), max_model_len=max_model_len)
    tokens = np.random.default_rng(2).integers(0, models_zoo.VOCAB_SIZE, length).tolist()
    reference = models_zoo.reference_logits(name, tokens)
    logits = Harness(executor).logits(tokens, chunk=100)
    assert np.abs(logits - reference).max() <= 1e-4 * np.abs(reference).max()
    executor.close()


HALVED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral-window",
    "opt-350m",
    "gpt2",
    "gemma2",
    "granite",
    "olmo2",
    "cohere",
    "gpt-neox",
)
HALVED_ON_GRAPHS = ("llama", "qwen3", "mistral-window", "opt-350m", "gemma2", "olmo2", "cohere")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("device", "name"),
    [
        *over_devices(HALVED, levels=("opt-350m", "gemma2"), torch=("opt-350m",)),
        *on("graph", HALVED_ON_GRAPHS, HALVED_ON_GRAPHS),
    ],
    indirect=["device"],
)
def test_logits_in_half_precision_differ_by_rounding(device: Device, name: str, dtype: DType) -> None:
    folder = models_zoo.folder(name, dtype)
    tokens = models_zoo.prompts()[-1]
    exact = Harness(load(device, folder)).logits(tokens)
    rounded = Harness(load(device, folder, dtype)).logits(tokens)
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    error = np.abs(rounded - exact) / np.abs(exact).max()
    # Roundings of some ten products in a row; were one of them coarser, or a weight misread, it would be far more.
    assert np.sqrt(np.mean(error**2)) <= 2 * epsilon
    assert error.max() <= 10 * epsilon


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("float32", "fp8_e5m2"),
        ("float32", "fp8_e4m3"),
        ("bfloat16", "int8"),
        ("float32", "int4"),
    ],
)
@pytest.mark.parametrize("device", device_ids(), indirect=True)
def test_the_cache_may_have_a_type_of_its_own(device: Device, dtype: DType, kv_cache_dtype: KvCacheDType) -> None:
    folder = models_zoo.folder("llama", dtype)
    tokens = models_zoo.prompts()[-1]
    if device.name == "torch" and kv_cache_dtype in ("fp8_e5m2", "fp8_e4m3", "int8", "int4"):
        with pytest.raises(DeviceError, match=f"not {kv_cache_dtype}: choose one"):
            load(device, folder, dtype, kv_cache_dtype=kv_cache_dtype)
        return
    exact = Harness(load(device, folder)).logits(tokens)
    executor = load(device, folder, dtype, kv_cache_dtype=kv_cache_dtype)
    logits = Harness(executor).logits(tokens)
    # Weights and cache are rounded; fp8_e5m2 has 2 bits of mantissa and fp8_e4m3 has 3, where bfloat16 has 7;
    # int4 has steps of an eighth of a group's largest number.
    epsilon = {"fp8_e5m2": 2.0**-4, "fp8_e4m3": 2.0**-5, "int4": 2.0**-4}.get(kv_cache_dtype, 2.0**-8)
    assert np.sqrt(np.mean((logits - exact) ** 2)) <= 2 * epsilon * np.abs(exact).max()
    np.testing.assert_array_equal(logits, Harness(executor, seed=1).logits(tokens, chunk=5))


BATCHED = ("llama", "llama-mqa", "mistral-window", "opt-350m", "gpt2", "gemma3", "granite", "cohere2", "mpt")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("device", "name"), over_devices(BATCHED, levels=("gemma3",), torch=("gemma3",)), indirect=["device"]
)
def test_logits_are_the_same_to_the_bit_however_batched_and_chunked(device: Device, name: str, dtype: DType) -> None:
    folder = models_zoo.folder(name, dtype)
    prompts = prompts_for(device)
    harness = Harness(load(device, folder, dtype))
    alone = [harness.generate([prompt], 12)[0] for prompt in prompts]
    for chunk in (1, 7, 2048):
        together = Harness(load(device, folder, dtype), seed=chunk).generate(prompts, 12, chunk)
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_array_equal(np.stack(one.logits), np.stack(other.logits), strict=True)


@pytest.mark.parametrize("device", [*device_ids()[:2], "graph"], indirect=True)
def test_copied_blocks_continue_like_the_original(device: Device) -> None:
    executor = load(device, models_zoo.folder("llama"))
    harness = Harness(executor)
    original = harness.start(models_zoo.prompts()[-1], 16)
    harness.step([original])
    copy = harness.start(models_zoo.prompts()[-1], 16)
    copy.tokens, copy.cached = list(original.tokens), original.cached
    executor.copy_blocks(np.array([original.blocks, copy.blocks], np.int32).T.copy())
    harness.step([original])
    harness.step([copy])
    np.testing.assert_array_equal(original.logits[-1], copy.logits[-1])
    executor.close()


@pytest.mark.parametrize("device", [*device_ids()[:2], "graph", "tpu"], indirect=True)
def test_closing_twice_is_allowed(device: Device) -> None:
    executor = load(device, models_zoo.folder("llama"))
    executor.close()
    executor.close()
