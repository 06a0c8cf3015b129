"""Families give transformers' greedy tokens, on one device and on several, and specs what the reference computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace

import models_zoo
import numpy as np
import pytest
from engine.devices.made_models import VOCAB_SIZE, decoder_of, reference
from engine.devices.test_specs import LAYER_NORM, SCORES, SPECS
from harness import Harness, check_greedy
from optional_packages import require_packages

from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import BranchSpec, EmbeddingSpec, HeadSpec

pytest.importorskip("jax")
torch = pytest.importorskip("torch")
require_packages("transformers")

OUTPUT_TOKENS = 16
# Each model takes a second to compile. This one has windows with two ropes. All that families need of a layer is in
# SPECS.
CHOSEN = ("gemma3",)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", models_zoo.swept(models_zoo.EVERYWHERE, CHOSEN))
def test_greedy_tokens_and_logits_are_those_of_transformers(name: str) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name))
    check_greedy(name, Harness(executor).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk=2))
    executor.close()


# Two sizes of steps are compiled. In `make test`, test_executor.py mixes the chunks of a model with a window.
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mistral-window", "mpt"])
def test_it_does_not_matter_how_prompts_are_chunked_and_mixed(name: str) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name), max_num_batched_tokens=32)
    for chunk in (3, 4):
        check_greedy(name, Harness(executor, seed=chunk).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk))
    for prompt in models_zoo.prompts():
        check_greedy(name, Harness(executor).generate([prompt], OUTPUT_TOKENS, chunk=32))
    executor.close()


ALL = {**SPECS, **SCORES}
BRANCHES = dict.fromkeys(branch for spec in ALL.values() for layer in spec.layers for branch in layer)


def said(of: object, at: str = "") -> set[tuple[str, object]]:
    """The fields of a branch and of its parts, with their values."""
    if isinstance(of, tuple) and any(map(is_dataclass, of)):
        return {pair for part in of for pair in said(part, at)}
    if not is_dataclass(of):
        return {(at, of)}
    name = f"{at}.{type(of).__name__}"
    return {(name, None)}.union(*(said(getattr(of, field.name), f"{name}.{field.name}") for field in fields(of)))


def fewest_with_every_value(branches: Collection[BranchSpec]) -> list[BranchSpec]:
    """Of the branches, few that together have each value of each field."""
    missing, found = set().union(*map(said, branches)), list[BranchSpec]()
    while missing:
        found.append(max(branches, key=lambda branch: len(said(branch) & missing)))
        missing -= said(found[-1])
    return found


# Branches that have all that the specs say, which compile as two models.
LAYERS = [(branch,) for branch in fewest_with_every_value(BRANCHES)]
TOGETHER = {
    "one half": replace(
        decoder_of(*LAYERS[::2]),
        embedding=EmbeddingSpec(40, 2048, norm=LAYER_NORM),
        head=HeadSpec(tied=False, divisor=2.0, bias=True),
    ),
    "the other half": replace(
        decoder_of(*LAYERS[1::2]), embedding=EmbeddingSpec(64, scale=8.0), head=HeadSpec(tied=True, softcap=3.0)
    ),
}


@pytest.mark.parametrize("name", [*TOGETHER, *(pytest.param(name, marks=pytest.mark.sweep) for name in ALL)])
def test_specs_give_what_the_reference_computes(name: str) -> None:
    from engine.devices.tpu.making import load

    spec = {**TOGETHER, **ALL}[name]
    expected = reference(spec)
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, len(expected)).tolist()
    executor = load(spec)
    logits = Harness(executor).logits(tokens, chunk=16)
    executor.close()
    np.testing.assert_allclose(logits, expected, atol=1e-3 * np.abs(expected).max())


# 2 KV heads are divided by 2 and doubled for 4; one is given to all; 4 and 6 are divided.
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("llama-bias", 4),
        *(
            pytest.param(*others, marks=pytest.mark.sweep)
            for others in [
                ("mpt", 2),
                ("llama-mqa", 4),
                ("llama", 2),
                ("gemma3", 4),
                ("olmo2", 4),
                ("falcon-one-norm", 2),
                ("opt-350m", 4),
            ]
        ),
    ],
)
def test_several_devices_give_the_tokens_of_one(name: str, num_devices: int) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name), num_devices)
    check_greedy(name, Harness(executor).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk=2))
    executor.close()


def test_heads_that_chips_cannot_share_are_refused_with_a_way_out() -> None:
    from engine.devices.tpu.making import load_folder

    with pytest.raises(DeviceError, match=r"6 query heads with 6 KV heads .* 4 chips: choose .*size 1 or 2 or 3 or 6$"):
        load_folder(models_zoo.folder("mpt"), 4)
    with pytest.raises(DeviceError, match="needs as many chips, and JAX finds 4 here: choose at most 4"):
        load_folder(models_zoo.folder("mpt"), 6)
