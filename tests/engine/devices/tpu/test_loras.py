"""Adapters: the TPU device computes what the torch reference computes, for each sequence with its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine.devices.made_models import MLP, NORM, PLAIN, ROPE, VOCAB_SIZE, RandomWeights, decoder_of
from harness import Harness, make_device

from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions, LoraLimits
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import ExpertsSpec, ResidualBlockSpec
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate
from tidewheel.engine.weights.tensor import DenseTensor

pytest.importorskip("jax")
pytest.importorskip("torch")

SPEC = decoder_of(
    (ResidualBlockSpec(replace(PLAIN, rope=ROPE), NORM), ResidualBlockSpec(ExpertsSpec(4, 2, 40, shared=MLP), NORM))
)
LIMITS = LoraLimits(max_loras=2, max_rank=13, dtype="float32")
TOKENS = np.random.default_rng(8).integers(0, VOCAB_SIZE, 14).tolist()


def update(name: str, inputs: int, outputs: int, rank: int, **more: object) -> LowRankUpdate:
    random = np.random.default_rng([inputs, outputs, rank, *name.encode()])
    a, b = (random.standard_normal(shape).astype(np.float32) / 4 for shape in ((rank, inputs), (outputs, rank)))
    return LowRankUpdate(name, a, b, 0.7, **more)  # type: ignore[arg-type]


def bias(size: int) -> np.ndarray:
    return np.linspace(-1, 1, size, dtype=np.float32)


# Parts of a matrix with ranks of their own, a bias and a shift; a high rank; the ends of the model, and ropes.
ADAPTERS = {
    7: LoraAdapter(
        (
            update("layers.0.q", 64, 100, 4, first_output=20),
            update("layers.0.q", 64, 120, 9, first_output=120, bias=bias(120)),
            update("layers.0.v", 64, 80, 0, shift=bias(80)),
        )
    ),
    3: LoraAdapter((update("layers.0.shared.up", 64, 96, 13), update("layers.0.router", 64, 4, 2))),
    5: LoraAdapter(
        (
            update("layers.0.experts.0.gate", 64, 40, 5),
            *(update(f"layers.0.experts.{expert}.up", 64, 30, 9, first_output=10) for expert in range(4)),
            update("layers.0.experts.3.down", 40, 64, 7),
            update("layers.0.experts.3.down", 40, 64, 2),
        )
    ),
    4: LoraAdapter(
        (update("embed", VOCAB_SIZE, 64, 3), update("head", 64, VOCAB_SIZE, 5), update("layers.0.o", 240, 64, 3)),
        rope_factor=2.0,
    ),
}


def loaded(name: str) -> Executor:
    device = make_device(name)
    options = ExecutorOptions(
        "float32",
        kv_cache_bytes=4096 * device.kv_bytes_per_token(SPEC, "float32"),
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        lora=LIMITS,
    )
    executor = device.load(SPEC, RandomWeights(SPEC), options)
    for number, adapter in ADAPTERS.items():
        executor.load_lora(number, adapter)
    return executor


# A step and a head are compiled without adapters and with them.
def test_each_sequence_is_computed_with_its_own_adapter() -> None:
    """There are more of them than slots, so some of them are written anew."""
    reference = Harness(loaded("torch"))
    expected = {number: reference.logits(TOKENS, adapter=number) for number in (-1, *ADAPTERS)}
    assert all(np.abs(expected[number] - expected[-1]).max() > 0.1 for number in ADAPTERS)
    executor = loaded("tpu")
    executor.warm_up(lambda done, steps: None)
    harness = Harness(executor)
    for together in ((7, -1, 3), (4, 7, 4), (5, -1, 3), (-1,), (3, 4), (7, 5)):
        sequences = [harness.start(TOKENS, 1, number) for number in together]
        while any(not sequence.logits for sequence in sequences):
            harness.step(sequences, chunk=5)
        for sequence in sequences:
            wanted = expected[sequence.adapter]
            np.testing.assert_allclose(sequence.logits[0], wanted[-1], atol=1e-3 * np.abs(wanted).max())
            harness.finish(sequence)
    executor.drop_lora(3)
    executor.load_lora(9, ADAPTERS[3])
    found = harness.logits(TOKENS, adapter=9)
    np.testing.assert_allclose(found, expected[3], atol=1e-3 * np.abs(expected[3]).max())
    assert executor.late_compilations == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (LoraAdapter((update("layers.0.experts.1.up", 64, 40, 2, bias=bias(40)),)), "cannot change the bias"),
        (LoraAdapter((update("layers.0.latent_o", 64, 40, 2),)), r"cannot change layers\.0\.latent_o"),
        (LoraAdapter((), {"head": DenseTensor(np.zeros((VOCAB_SIZE, 64), np.float32), "float32")}), "whole"),
        (LoraAdapter((update("layers.0.q", 64, 240, 7),) * 2), "14 together for layers.0.q: raise --max-lora-rank"),
    ],
)
def test_what_adapters_cannot_change_here_is_refused(adapter: LoraAdapter, words: str) -> None:
    with pytest.raises(DeviceError, match=words):
        slots(LIMITS).load(0, adapter)


def test_adapters_of_experts_are_refused_where_they_have_no_room() -> None:
    without = slots(LoraLimits(2, 13, "float32", of_experts=False))
    with pytest.raises(DeviceError, match=r"layers\.0\.experts\.0\.gate, .* --lora-modules"):
        without.load(0, ADAPTERS[5])
    without.load(0, ADAPTERS[3])


@pytest.mark.parametrize(("max_rank", "expected"), [(8, 8), (16, 16), (32, 16), (200, 16)])
def test_a_step_takes_the_smallest_rank_that_holds_its_adapters(max_rank: int, expected: int) -> None:
    limits = LoraLimits(2, max_rank, "float32")
    loaded = slots(limits)
    for number, rank in enumerate((5, 8, 17, 65, 0)):
        if rank <= max_rank:
            loaded.load(number, LoraAdapter((update("layers.0.q", 64, 240, rank),)))
    assert loaded.rank({0, 1}) == loaded.rank({4}) == expected
    if max_rank >= 17:
        assert loaded.rank({0, 2}) == min(64, max_rank)
    if max_rank == 200:
        assert loaded.rank({3, 1}) == 200


def slots(limits: LoraLimits) -> Any:
    import jax
    from jax.sharding import Mesh

    from tidewheel.engine.devices.tpu.loras import LoraSlots, lora_arrays

    mesh = Mesh(np.array(jax.local_devices()[:1]), ("model",))
    return LoraSlots(lora_arrays(SPEC, limits, mesh), limits)
