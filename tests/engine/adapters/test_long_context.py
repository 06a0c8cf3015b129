"""Adapters for longer contexts than the model's: logits equal transformers' with linear rope scaling and peft."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import lora_files
import lora_zoo
import models_zoo
import numpy as np
import pytest
from harness import Harness, device_ids, load, make_device
from numpy.typing import NDArray
from optional_packages import require_packages

from tidewheel.engine.adapters.long_context import LongContexts, with_longer_contexts
from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source

require_packages("peft")

_DEVICES = device_ids()
_BEST = _DEVICES[1]
_TARGETS = {"target_modules": ("o_proj", "down_proj")}
FACTORS = (2.0, 4.0, 1.5)
TOKENS = [(7 * i * i + 3 * i) % 250 + 4 for i in range(100)]


def adapter(model: str, factor: float, tmp_path: Path, seed: int = 0) -> Path:
    """An adapter whose context is `factor` times the model's."""
    original = lora_zoo.folder(model, seed, **_TARGETS)
    tmp_path.mkdir(parents=True, exist_ok=True)
    config = json.loads((original / "adapter_config.json").read_text())
    own = describe(open_source(str(models_zoo.folder(model))).config).spec.max_positions
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "context_length": int(own * factor)}))
    (tmp_path / "adapter_model.safetensors").write_bytes((original / "adapter_model.safetensors").read_bytes())
    return tmp_path


def expected(model: str, factor: float, seed: int = 0) -> NDArray[np.float32]:
    """What transformers and peft compute with the rope scaled."""
    import torch

    original = models_zoo.model(model)
    config = copy.deepcopy(original.config)
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    config._attn_implementation = "eager"
    scaled = type(original)(config)
    scaled.load_state_dict(original.state_dict())
    fields = tuple((key, value) for key, value in _TARGETS.items())
    with torch.no_grad():
        found: NDArray[np.float32] = (
            lora_zoo.adapted(scaled, seed, fields)(torch.tensor([TOKENS])).logits[0].float().numpy()
        )
    return found


@functools.cache
def harness(device: str, model: str) -> Harness:
    limits = LoraLimits(max_loras=4, max_rank=16, dtype="float32")
    return Harness(load(make_device(device), models_zoo.folder(model), lora=limits))


def loaded(device: str, model: str, number: int, folder: Path) -> Harness:
    config = open_source(str(models_zoo.folder(model))).config
    description, contexts = with_longer_contexts(describe(config), config, FACTORS, None)
    running = harness(device, model)
    running.executor.load_lora(number, read_peft_folder(folder, description, 16, contexts=contexts))
    return running


@pytest.mark.parametrize(("model", "factor"), [("llama", 2.0), ("llama", 1.5), ("qwen3", 4.0), ("minicpm3", 4.0)])
def test_the_rope_is_scaled_for_its_sequences(model: str, factor: float, tmp_path: Path) -> None:
    wanted = expected(model, factor)
    for device in _DEVICES[:2] if factor == 4 else [_BEST]:
        running = loaded(device, model, 0, adapter(model, factor, tmp_path / device))
        found = running.logits(TOKENS, adapter=0)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(lora_zoo.logits(model, TOKENS, **_TARGETS) - wanted).max() > 0.1


@pytest.mark.parametrize("model", ["llama", "minicpm3"])
def test_others_keep_their_bits_beside_it(model: str, tmp_path: Path) -> None:
    for number, factor in enumerate((1.0, 2.0, 4.0)):
        running = loaded(_BEST, model, number, adapter(model, factor, tmp_path / str(number)))
    alone = {number: running.logits(TOKENS, adapter=number) for number in (-1, 0, 1, 2)}
    plain = Harness(load(make_device(_BEST), models_zoo.folder(model))).logits(TOKENS)
    assert (alone[-1] == plain).all()
    assert len({alone[number].tobytes() for number in alone}) == 4
    sequences = [running.start(TOKENS, 1, number) for number in (2, -1, 0, 1, 0, -1, 2)]
    running.step(sequences)
    for sequence in sequences:
        running.finish(sequence)
        assert (sequence.logits[0] == alone[sequence.adapter][-1]).all()
        assert (running.logits(TOKENS, chunk=7, adapter=sequence.adapter) == alone[sequence.adapter]).all()


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("context_length", "factor"), [(None, 1.0), (1, 1.0), (64, 1.0), (128, 2.0), (96, 1.5), (200, 4.0), (256, 4.0)]
)
def test_a_context_says_by_how_much(tmp_path: Path, context_length: int | None, factor: float) -> None:
    folder = lora_files.write(tmp_path, context_length=context_length)
    found = read_peft_folder(folder, describe(LLAMA), 16, contexts=LongContexts(64, FACTORS))
    assert found.rope_factor == factor
    same = read_peft_folder(lora_files.write(tmp_path), describe(LLAMA), 16)
    assert (found.digest == same.digest) == (factor == 1)


@pytest.mark.parametrize(
    ("context_length", "words"),
    [
        (512, "context_length 512 is 8 times the model's own context of 64 tokens: start with "),
        (65, r"start with --long-lora-scaling-factors 2.0, not only 4.0"),
        (0, "context_length must be a number of tokens"),
        (-64, "must be a number of tokens"),
        (128.0, "must be a number of tokens"),
        (True, "must be a number of tokens"),
        ("128", "must be a number of tokens"),
        (10**30, "must be a number of tokens"),
    ],
)
def test_other_contexts_are_refused(tmp_path: Path, context_length: object, words: str) -> None:
    folder = lora_files.write(tmp_path, context_length=context_length)
    with pytest.raises(ModelError, match=words):
        read_peft_folder(folder, describe(LLAMA), 16, contexts=LongContexts(64, (4.0,)))
    if context_length == 512:
        with pytest.raises(ModelError, match=r"start with --long-lora-scaling-factors 8\.0$"):
            read_peft_folder(folder, describe(LLAMA), 16)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "this one has a rope of linear"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            "needs a model with one unscaled rope, and this one has a rope of yarn: leave it out",
        ),
    ],
)
def test_models_whose_rope_is_another_are_refused(changed: dict[str, Any], words: str) -> None:
    config = {**LLAMA, **changed}
    with pytest.raises(ModelError, match=words):
        with_longer_contexts(describe(config), config, (2.0,), None)


@pytest.mark.parametrize("model", ["gpt2", "bloom", "gemma3", "mamba2"])
def test_models_without_one_rope_are_refused(model: str) -> None:
    config = open_source(str(models_zoo.folder(model))).config
    with pytest.raises(ModelError, match="--long-lora-scaling-factors needs a model with one unscaled rope"):
        with_longer_contexts(describe(config), config, (2.0,), None)


def test_the_longest_context_is_that_of_the_largest_factor() -> None:
    description, contexts = with_longer_contexts(describe(LLAMA), LLAMA, FACTORS, 256)
    assert (description.spec.max_positions, contexts.own, contexts.longest) == (256, 64, 256)
    with pytest.raises(ModelError, match="a context of 257 tokens is more than this model's 64, and more than the 256"):
        with_longer_contexts(describe(LLAMA), LLAMA, FACTORS, 257)
