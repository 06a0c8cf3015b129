"""The graph executor computes what transformers computes, and all that specs may say, padded and in parts."""

from __future__ import annotations

import models_zoo
import numpy as np
import pytest
from engine.devices.made_models import VOCAB_SIZE, RandomWeights, reference
from engine.devices.test_specs import SCORES, SPECS
from harness import Harness, check_greedy
from optional_packages import require_packages

from tidewheel.engine.weights.dtypes import DType

torch = pytest.importorskip("torch")
require_packages("transformers")

from engine.devices.graph.loading import load  # noqa: E402

OUTPUT_TOKENS = 24
# Windows, two ropes, projections around the layers, branches side by side, ALiBi, and long contexts. All that families
# need of a layer is in SPECS.
CHOSEN = ("mistral-window", "gemma3", "opt-350m", "cohere2", "mpt", "gpt2-scaled", "phi3-longrope")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", models_zoo.swept(models_zoo.EVERYWHERE, CHOSEN))
def test_greedy_tokens_and_logits_are_those_of_transformers(name: str) -> None:
    executor = load(models_zoo.folder(name))
    check_greedy(name, Harness(executor).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk=7))
    assert executor.stats().num_outside == 0
    executor.close()


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "opt", "mpt"])
def test_whole_prompts_run_together(name: str) -> None:
    executor = load(models_zoo.folder(name))
    check_greedy(name, Harness(executor, seed=1).generate(models_zoo.prompts(), 8))
    prompts = [use for use in executor.stats().uses if use.phase == "prompt"]
    assert any(use.bucket.batch_size > 1 for use in prompts)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "opt", "gemma3", "phi3", "cohere2", "mpt"])
def test_logits_over_long_contexts(name: str) -> None:
    executor = load(models_zoo.folder(name))
    tokens = np.random.default_rng(2).integers(0, models_zoo.VOCAB_SIZE, 230).tolist()
    reference = models_zoo.reference_logits(name, tokens)
    logits = Harness(executor).logits(tokens, chunk=100)
    assert np.abs(logits - reference).max() <= 1e-4 * np.abs(reference).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "opt-350m", "gemma2", "olmo2", "cohere"])
def test_logits_in_half_precision_differ_by_rounding(name: str, dtype: DType) -> None:
    folder = models_zoo.folder(name, dtype)
    tokens = models_zoo.prompts()[-1]
    exact = Harness(load(folder)).logits(tokens)
    rounded = Harness(load(folder, dtype=dtype)).logits(tokens)
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    error = np.abs(rounded - exact) / np.abs(exact).max()
    assert np.sqrt(np.mean(error**2)) <= 2 * epsilon
    assert error.max() <= 10 * epsilon


@pytest.mark.parametrize("name", [*SPECS, *SCORES])
def test_all_that_specs_may_say(name: str) -> None:
    spec = {**SPECS, **SCORES}[name]
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, 40).tolist()
    expected = reference(spec)
    harness = Harness(load((spec, RandomWeights(spec))))
    for chunk in (7, 2048):
        logits = harness.logits(tokens, chunk)
        np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
