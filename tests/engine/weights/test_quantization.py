"""Quantized weights: how far they move the embedded model, what they cost, and what is refused."""

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

from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.quantization import Quantization, parse_quantization
from tidewheel.server.commands.serve import DEMO_MODEL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tidewheel._native") is None, reason="needs the native extension"
)

_DEMO = Path(DEMO_MODEL)
_PROMPT_TOKENS = 192

# Mean Kullback-Leibler divergence from float32, in nats a token, that each may have.
BOUNDS = [
    (Quantization("int8"), 0.001),
    (Quantization("int8-channel"), 0.001),
    (Quantization("int4"), 0.05),
    (Quantization("int4", zero_points=True), 0.05),
    (Quantization("int4", 64), 0.06),
    (Quantization("int4", 128), 0.07),
    (Quantization("int4", 128, zero_points=True), 0.07),
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


def log_probabilities(dtype: DType, quantization: Quantization | None) -> NDArray[np.float64]:
    """Of every next token after every token of the conversations, [tokens, vocabulary]."""
    executor = load(make_device(device_ids()[1]), _DEMO, dtype, quantization=quantization)
    values = np.concatenate([Harness(executor).logits(tokens) for tokens in conversations()]).astype(np.float64)
    executor.close()
    values -= values.max(axis=1, keepdims=True)
    normalized: NDArray[np.float64] = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return normalized


@functools.cache
def reference() -> NDArray[np.float64]:
    return log_probabilities("float32", None)


@pytest.mark.parametrize(("quantization", "bound"), BOUNDS, ids=str)
def test_divergence_of_the_embedded_model(quantization: Quantization, bound: float) -> None:
    exact, quantized = reference(), log_probabilities("bfloat16", quantization)
    divergence = (np.exp(exact) * (exact - quantized)).sum(axis=1)
    assert bound / 100 < divergence.mean() < bound


def test_bits_are_saved() -> None:
    sizes = {}
    for quantization in (None, Quantization("int8"), Quantization("int8-channel"), Quantization("int4")):
        executor = load(make_device(device_ids()[1]), _DEMO, "bfloat16", quantization=quantization)
        sizes[quantization] = executor.native.weight_bytes  # type: ignore[attr-defined]
        executor.close()
    plain = sizes.pop(None)
    for quantization, size in sizes.items():
        # The small model's norms and scales weigh, and its embedding stays int8.
        assert size < plain * (quantization.bytes_per_parameter / 2 + 0.07)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "opt-350m", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["int8", "int8-channel", "int4"])
def test_every_family_is_near_its_own_float32(family: str, method: str) -> None:
    folder = models_zoo.folder(family)
    device = make_device(device_ids()[1])
    outputs = []
    for quantization in (None, parse_quantization(method)):
        executor = load(device, folder, "float32", quantization=quantization)
        outputs.append(Harness(executor).logits(list(range(5, 45))))
        executor.close()
    exact, quantized = outputs
    error = np.linalg.norm(quantized - exact) / np.linalg.norm(exact)
    assert 0 < error < (0.7 if method == "int4" else 0.12)  # tiny random models magnify errors


def test_torch_refuses_by_name() -> None:
    with pytest.raises(DeviceError, match="--quantization"):
        load(make_device("torch"), _DEMO, quantization=Quantization("int8"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("int3",), "int8, int8-channel, int4"),
        (("int4", 48), "32, 64 or 128"),
        (("int8", 64), "--quantization-group-size"),
        ((None, 64), "--quantization-group-size"),
        (("int8", None, True), "--quantization-zero-points"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str | None, int | None, bool], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_quantization(*arguments)
