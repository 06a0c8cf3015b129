"""Mixtures of experts: the CPU computes what the torch reference computes, on every level, in every batch."""

from __future__ import annotations

from dataclasses import replace

import jax_processors
import numpy as np
import pytest
from engine.devices.made_models import (
    MLP,
    NORM,
    PLAIN,
    ROPE,
    VOCAB_SIZE,
    RandomWeights,
    decoder_of,
    load,
    reference,
    run,
)
from harness import Harness, device_ids, over_devices
from samples import sample, swept

from tidewheel.engine.models.spec import DecoderSpec, ExpertsSpec, MlpSpec, ParallelSpec, ResidualBlockSpec, RouterSpec
from tidewheel.engine.weights.tensor import DenseTensor

torch = pytest.importorskip("torch")

CPU_IDS = [device_id for device_id in device_ids() if device_id != "torch"]
TURNED = replace(PLAIN, rope=ROPE)
# No size is a multiple of a panel's columns.
PLAIN_EXPERTS = ExpertsSpec(7, 3, 40)
SHARED = MlpSpec(72, "gelu", gated=True)


def mixture(experts: ExpertsSpec) -> DecoderSpec:
    layer = (ResidualBlockSpec(TURNED, NORM), ResidualBlockSpec(experts, NORM, scale=0.5))
    return decoder_of(layer, layer)


SPECS = {
    "softmax": mixture(PLAIN_EXPERTS),
    "one of two": mixture(ExpertsSpec(2, 1, 40)),
    "all": mixture(ExpertsSpec(4, 4, 40, router=RouterSpec(normalize=False))),
    "groups": mixture(
        replace(
            PLAIN_EXPERTS, num_experts=8, router=RouterSpec(normalize=False, num_groups=4, kept_groups=2, scale=2.5)
        )
    ),
    "sigmoid, groups by their best two, shared": mixture(
        ExpertsSpec(
            8,
            3,
            40,
            router=RouterSpec(
                "sigmoid", bias=True, correction_bias=True, num_groups=4, kept_groups=2, group_score="best_two"
            ),
            shared=SHARED,
        )
    ),
    "a gate of the shared expert": mixture(replace(PLAIN_EXPERTS, shared=SHARED, shared_gate=True, activation="relu")),
    "a sparse mixer": mixture(
        replace(PLAIN_EXPERTS, router=RouterSpec("sparse_mixer", normalize=False, scale=1.5, jitter=0.3))
    ),
    "clipped SwiGLU with biases": mixture(replace(PLAIN_EXPERTS, bias=True, swiglu_limit=1.0)),
    "without gates": mixture(
        replace(PLAIN_EXPERTS, activation="relu2", shared=MlpSpec(72, "relu2", gated=False), gated=False)
    ),
    "weighed inputs": mixture(
        ExpertsSpec(5, 1, 40, weighs_input=True, router=RouterSpec("sigmoid", normalize=False), shared=SHARED)
    ),
    "norms of their own": decoder_of(
        (
            ResidualBlockSpec(TURNED, NORM),
            ResidualBlockSpec(
                replace(
                    PLAIN_EXPERTS,
                    router=RouterSpec(norm=NORM, input_scale=0.4, expert_scales=True),
                    input_norm=NORM,
                ),
                post_norm=NORM,
            ),
        )
    ),
    "beside an MLP": decoder_of(
        (
            ResidualBlockSpec(TURNED, NORM),
            ResidualBlockSpec(
                ParallelSpec((ResidualBlockSpec(MLP, NORM), ResidualBlockSpec(PLAIN_EXPERTS, None, NORM))), NORM
            ),
        )
    ),
}


# Among them each way to choose and to compute experts that has a kernel of its own.
OF_LEVELS = (
    "sigmoid, groups by their best two, shared",
    "clipped SwiGLU with biases",
    "without gates",
    "weighed inputs",
)


OF_TPUS = (*OF_LEVELS, "a sparse mixer", "a gate of the shared expert")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("device_id", "name"), over_devices(SPECS, levels=OF_LEVELS))
def test_every_level_computes_what_the_reference_computes(device_id: str, name: str) -> None:
    expected, ours = reference(SPECS[name]), run(device_id, SPECS[name])
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    for chunk in (1, 7):
        np.testing.assert_array_equal(run(device_id, SPECS[name], chunk), ours)


# One layer of each kind of router and of experts that `make test` has.
TOGETHER = decoder_of(*(SPECS[name].layers[0] for name in OF_TPUS))


@pytest.mark.parametrize("name", ["together", *map(swept, SPECS)])
def test_tpus_compute_what_the_reference_computes(name: str) -> None:
    spec = {"together": TOGETHER, **SPECS}[name]
    expected = reference(spec)
    with jax_processors.asked_for():
        logits = run("tpu", spec, chunk=16)
    np.testing.assert_allclose(logits, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", sample(SPECS, lambda name: name in OF_LEVELS))
def test_graphs_compute_what_the_reference_computes(name: str) -> None:
    expected = reference(SPECS[name])
    for chunk in (7, 2048):  # with fewer pairs of a token and an expert than experts, and with more
        np.testing.assert_allclose(run("graph", SPECS[name], chunk), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", [name for name in SPECS if name != "softmax"])
def test_all_of_this_matters(name: str) -> None:
    changed = reference(SPECS[name])
    assert np.abs(changed - reference(SPECS["softmax"])).max() > 1e-2 * np.abs(changed).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups by their best two, shared"])
def test_neither_batch_nor_threads_change_a_bit(name: str, dtype: str) -> None:
    if not CPU_IDS:
        pytest.skip("there is no native module")
    spec, random = SPECS[name], np.random.default_rng(6)
    prompts = [random.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 40, 9, 33)]
    harness = Harness(load(CPU_IDS[-1], spec, dtype, dtype))  # type: ignore[arg-type]
    alone = [harness.generate([prompt], 6)[0] for prompt in prompts]
    for chunk, threads in ((5, "auto"), (2048, "0")):
        executor = load(CPU_IDS[-1], spec, dtype, dtype, threads)  # type: ignore[arg-type]
        for one, other in zip(alone, Harness(executor, seed=chunk).generate(prompts, 6, chunk), strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_array_equal(np.stack(one.logits), np.stack(other.logits), strict=True)


class EqualScores(RandomWeights):
    """Routers that find all experts equally good."""

    def __getitem__(self, name: str) -> DenseTensor:
        tensor = super().__getitem__(name)
        return replace(tensor, data=np.zeros_like(tensor.data)) if ".router." in name else tensor


@pytest.mark.parametrize("device_id", ["torch", "graph", *CPU_IDS[-1:]])
def test_of_equally_good_experts_the_first_ones_are_chosen(device_id: str) -> None:
    router = RouterSpec("sigmoid", num_groups=4, kept_groups=2, group_score="best_two")
    of_eight, of_three = mixture(ExpertsSpec(8, 3, 40, router=router)), mixture(ExpertsSpec(3, 3, 40))
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, 20).tolist()
    first, only = (Harness(load(device_id, spec, weights=EqualScores)).logits(tokens) for spec in (of_eight, of_three))
    np.testing.assert_allclose(first, only, atol=1e-5 * np.abs(only).max())
