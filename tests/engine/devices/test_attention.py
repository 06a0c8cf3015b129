"""Attention as specs describe it and no family in the zoo has it yet: long contexts, score caps, ALiBi."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, get_args

import numpy as np
import pytest
from engine.devices.made_models import PLAIN, ROPE, SLOPES, VOCAB_SIZE, decoder, load
from harness import Harness, device_ids
from numpy.typing import NDArray

from tidewheel.engine.models.spec import AttentionSpec
from tidewheel.engine.weights.dtypes import KvCacheDType

torch = pytest.importorskip("torch")

CPU_IDS = [device_id for device_id in device_ids() if device_id != "torch"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def logits(device_id: str, attention: AttentionSpec) -> NDArray[np.float32]:
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, 40).tolist()
    return Harness(load(device_id, decoder(attention, attention))).logits(tokens)


@pytest.mark.parametrize("device_id", CPU_IDS)
@pytest.mark.parametrize(
    "attention",
    [
        dataclasses.replace(PLAIN, rope=ROPE, softcap=2.0),
        dataclasses.replace(PLAIN, alibi_slopes=SLOPES),
        dataclasses.replace(PLAIN, alibi_slopes=SLOPES, softcap=3.0, sliding_window=9),
    ],
    ids=["softcap", "alibi", "both in a window"],
)
def test_caps_and_slopes_agree_with_the_reference(device_id: str, attention: AttentionSpec) -> None:
    reference = logits("torch", attention)
    ours = logits(device_id, attention)
    np.testing.assert_allclose(ours, reference, atol=1e-4 * np.abs(reference).max())
    for without in ({"softcap": None}, {"alibi_slopes": None}):
        other = dataclasses.replace(attention, **without)
        if other != attention:
            assert np.abs(logits(device_id, other) - ours).max() > 1e-2 * np.abs(reference).max()


@pytest.mark.parametrize(
    "kv_cache_dtype",
    [
        pytest.param(kind, marks=() if kind in ("bfloat16", "int8", "int4") else pytest.mark.sweep)
        for kind in get_args(KvCacheDType)
    ],
)
@pytest.mark.parametrize("device_id", CPU_IDS[:1])  # the native tests split contexts on every level
def test_a_long_context_gives_the_same_bits_on_any_number_of_threads(
    device_id: str, kv_cache_dtype: KvCacheDType
) -> None:
    native: Any = importlib.import_module("tidewheel._native")
    cpus = [processor["cpu"] for processor in native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("this machine has one processor")
    attention = dataclasses.replace(PLAIN, rope=ROPE)
    spec = decoder(attention, dataclasses.replace(attention, sliding_window=700))
    prompts = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, n).tolist() for seed, n in enumerate((1540, 3, 530))]
    # A prompt alone, at once, on one thread; and all together in chunks, the long ones' pieces shared by two. Then each
    # of the two has heads of its own.
    harness = Harness(load(device_id, spec, "bfloat16", kv_cache_dtype, str(cpus[0])))
    alone = [harness.generate([prompt], 5)[0] for prompt in prompts]
    pair = Harness(load(device_id, spec, "bfloat16", kv_cache_dtype, f"{cpus[0]},{cpus[1]}"), seed=1)
    groups = Harness(load(device_id, spec, "bfloat16", kv_cache_dtype, f"{cpus[0]}|{cpus[1]}"), seed=2)
    for together in (
        [pair.generate([prompt], 5)[0] for prompt in prompts],
        pair.generate(prompts, 5, chunk=400),
        groups.generate(prompts, 5, chunk=400),
    ):
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_array_equal(np.stack(one.logits), np.stack(other.logits), strict=True)


def test_attention_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads need as many ALiBi slopes, not 2"):
        dataclasses.replace(PLAIN, alibi_slopes=(0.5, 0.25))
    with pytest.raises(ValueError, match="rope or by ALiBi"):
        dataclasses.replace(PLAIN, alibi_slopes=SLOPES, rope=ROPE)
    with pytest.raises(ValueError, match="above 0"):
        dataclasses.replace(PLAIN, softcap=0.0)
