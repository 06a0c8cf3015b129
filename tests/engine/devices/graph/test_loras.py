"""LoRA adapters share few slots of a device, and steps of any mix of them give what each gives alone."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from engine.devices.graph.loading import EAGER, load
from engine.devices.made_models import NORM, PLAIN, ROPE, VOCAB_SIZE, RandomWeights, decoder, decoder_of
from harness import Harness
from msgspec import structs

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.limits import ExecutorOptions, LoraLimits
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import DecoderSpec, ExpertsSpec, ResidualBlockSpec, tensor_shapes
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate
from tidewheel.engine.weights.tensor import DenseTensor

torch = pytest.importorskip("torch")

SPEC = decoder(PLAIN)
WITH_EXPERTS = decoder_of((ResidualBlockSpec(PLAIN, NORM), ResidualBlockSpec(ExpertsSpec(4, 2, 40), NORM)))
TOKENS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 20).tolist()
LIMITS = LoraLimits(max_loras=2, max_rank=4, dtype="float32")


def adapter(
    number: int, names: tuple[str, ...] = ("layers.0.q", "layers.0.down"), rank: int = 3, spec: DecoderSpec = SPEC
) -> LoraAdapter:
    updates = []
    for name in names:
        outputs, inputs = tensor_shapes(spec)[f"{name}.weight"]
        random = np.random.default_rng(zlib.crc32(name.encode()) + number)
        a, b, bias = (random.standard_normal(shape, np.float32) for shape in ((rank, inputs), (outputs, rank), outputs))
        updates.append(LowRankUpdate(name, a, b / 9, 0.5, bias=bias))
    return LoraAdapter(tuple(updates))


def running(*adapters: LoraAdapter) -> Harness:
    harness = Harness(load((SPEC, RandomWeights(SPEC)), EAGER, lora=LIMITS))
    for number, one in enumerate(adapters):
        harness.executor.load_lora(number, one)
    return harness


def test_more_adapters_than_slots_take_turns() -> None:
    harness = running(*map(adapter, range(4)))
    alone = {number: running(adapter(number)).logits(TOKENS, adapter=0) for number in range(4)}
    alone[-1] = Harness(load((SPEC, RandomWeights(SPEC)), EAGER)).logits(TOKENS)
    assert all(np.abs(alone[number] - alone[-1]).max() > 0.1 for number in range(4))
    for numbers in ((0, 1, -1, 0), (1, 2), (3, -1), (0, 3)):
        sequences = [harness.start(TOKENS, 2, number) for number in numbers]
        harness.step(sequences)
        harness.step(sequences)
        for sequence in sequences:
            np.testing.assert_allclose(sequence.logits[0], alone[sequence.adapter][-1], atol=1e-4)
            harness.finish(sequence)


def test_experts_have_adapters_of_their_own() -> None:
    names = [f"layers.0.experts.{expert}.{name}" for expert in range(4) for name in ("gate", "up", "down")]
    adapters = (adapter(0, tuple(names[:7]), 3, WITH_EXPERTS), adapter(1, tuple(names[4:]), 2, WITH_EXPERTS))
    model = WITH_EXPERTS, RandomWeights(WITH_EXPERTS)
    options = ExecutorOptions("float32", 1 << 20, 256, 8, 64, lora=LIMITS)
    reference = Harness(get_device("torch").load(*model, options))
    harness = Harness(load(model, EAGER, lora=LIMITS))
    for number, one in enumerate(adapters):
        reference.executor.load_lora(number, one)
        harness.executor.load_lora(number, one)
    expected = {number: reference.logits(TOKENS, adapter=number)[-1] for number in (-1, 0, 1)}
    assert all(np.abs(expected[number] - expected[-1]).max() > 0.1 for number in (0, 1))
    sequences = [harness.start(TOKENS, 1, number) for number in (0, -1, 1)]
    harness.step(sequences)
    for sequence in sequences:
        np.testing.assert_allclose(sequence.logits[0], expected[sequence.adapter], rtol=1e-3, atol=1e-3)
    without = load(model, EAGER, lora=structs.replace(LIMITS, of_experts=False))
    with pytest.raises(DeviceError, match=r"layers\.0\.experts\.0\.gate, .* --lora-modules"):
        without.load_lora(0, adapters[0])


def test_a_number_may_be_given_to_another_adapter() -> None:
    harness = running(adapter(0))
    first = harness.logits(TOKENS, adapter=0)
    harness.executor.drop_lora(0)
    harness.executor.load_lora(0, adapter(1))
    second = harness.logits(TOKENS, adapter=0)
    np.testing.assert_allclose(second, running(adapter(1)).logits(TOKENS, adapter=0), atol=1e-4)
    assert np.abs(first - second).max() > 0.1


def test_an_adapter_may_stretch_positions() -> None:
    spec = decoder(replace(PLAIN, rope=ROPE))
    made = [Harness(load((spec, RandomWeights(spec)), EAGER, lora=LIMITS)) for _ in range(2)]
    made[0].executor.load_lora(0, LoraAdapter((), rope_factor=4.0))
    stretched = decoder(replace(PLAIN, rope=replace(ROPE, inv_freq=tuple(f / 4 for f in ROPE.inv_freq))))
    expected = Harness(load((stretched, RandomWeights(spec)), EAGER)).logits(TOKENS)
    np.testing.assert_allclose(made[0].logits(TOKENS, adapter=0), expected, atol=1e-4)
    assert np.abs(made[1].logits(TOKENS) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            LoraAdapter((), matrices={"head": DenseTensor(np.zeros((VOCAB_SIZE, 64), np.float32), "float32")}),
            "this adapter has its own head, for which accelerators have no room: take --device cpu",
        ),
        (
            LoraAdapter((*adapter(0, rank=4).updates, *adapter(1).updates)),
            "changes layers.0.q in parts, whose ranks are together 7: raise --max-lora-rank to that",
        ),
        (
            LoraAdapter((LowRankUpdate("layers.7.q", np.ones((1, 64), np.float32), np.ones((9, 1), np.float32), 1.0),)),
            "this adapter changes layers.7.q, which accelerators compute without adapters: take --device cpu",
        ),
    ],
)
def test_what_no_slot_has_room_for_is_refused(wrong: LoraAdapter, message: str) -> None:
    harness = running()
    with pytest.raises(DeviceError, match=message):
        harness.executor.load_lora(0, wrong)
