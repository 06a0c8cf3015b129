"""Folders with quantized checkpoints are served: their tokens are transformers' for the weights they stand for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import lora_zoo
import models_zoo
import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import FORMATS, MXFP4, mxfp4_experts, save
from harness import Harness, load, make_device
from optional_packages import require_packages

from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.core.request import Request
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models import describe
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights import open_source

torch = pytest.importorskip("torch")
require_packages("transformers")

PROMPT = [7, 20, 300, 41, 5]
NUM_TOKENS = 12


def quantized(folder: Path, kind: str) -> list[int]:
    """Make a folder of that format of a tiny Llama. What transformers generates with the weights that it stands for."""
    reference = quantized_model(folder, kind)
    ids = torch.tensor([PROMPT])
    generated = reference.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    tokens: list[int] = generated[0, len(PROMPT) :].tolist()
    return tokens


def quantized_model(folder: Path, kind: str) -> Any:
    """Make such a folder. Transformers' model with the weights that it stands for."""
    reference = models_zoo.build(models_zoo.CASES["llama"])
    reference.save_pretrained(folder)
    models_zoo.train_tokenizer().save_pretrained(folder)
    random, tensors = np.random.default_rng(0), {}
    with torch.no_grad():
        for name, weight in reference.state_dict().items():
            if ".layers." not in name or weight.ndim == 1:
                tensors[name] = weight.numpy()
                continue
            parts, values = FORMATS[kind].make(random, *weight.shape)
            tensors |= {name.removesuffix("weight") + part: array for part, array in parts.items()}
            weight.copy_(torch.from_numpy(values))
    config = json.loads((folder / "config.json").read_text())
    save(folder, {**config, "quantization_config": FORMATS[kind].config}, tensors)
    return reference


def gguf_model(path: Path) -> Any:
    """A tiny Llama in a GGUF file of type Q4_0. Transformers' model with the weights that it stands for."""
    kind = gguf.GGMLQuantizationType.Q4_0
    reference = models_zoo.build(models_zoo.CASES["llama"])
    gguf_files.write(path, reference, quantize=gguf_files.quantized(kind))
    with torch.no_grad():
        for weight in reference.state_dict().values():
            if weight.ndim == 2:
                blocks = gguf.quants.quantize(weight.numpy(), kind)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    return reference


def served(folder: Path, device: str, **options: str) -> list[int]:
    async def main() -> list[int]:
        engine = load_engine(
            EngineOptions(str(folder), device=device, dtype="float32", max_model_len=64, max_num_seqs=2, **options)  # type: ignore[arg-type]
        )
        engine.start()
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        outputs = [output async for output in engine.submit(Request("r", PROMPT, params))]
        await engine.stop()
        return [token for output in outputs for token in output.token_ids]

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["fp8", "nf4-double"])
def test_tokens_are_those_of_the_weights(tmp_path: Path, kind: str) -> None:
    expected = quantized(tmp_path, kind)
    assert len(set(expected)) > 3
    assert served(tmp_path, "cpu") == expected


@pytest.mark.parametrize("kind", ["gptq-4", "awq", "nf4-double", "gguf"])
def test_adapters_of_quantized_models_are_peft_s_over_the_weights(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft")
    base = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    reference = gguf_model(base) if kind == "gguf" else quantized_model(base, kind)
    ids = torch.tensor([[*range(7, 40)]])
    with torch.no_grad():
        plain = reference(ids).logits[0].numpy()
        model = lora_zoo.adapted(reference)
        expected = model(ids).logits[0].numpy()
    model.save_pretrained(tmp_path / "adapter")
    change = np.square(expected - plain).mean()
    for device, most in (("torch", 1e-8), ("cpu", 0.05**2)):
        running = Harness(load(make_device(device), base, lora=LoraLimits(1, 16, "float32")))
        adapter = read_peft_folder(tmp_path / "adapter", describe(open_source(str(base)).config), 16)
        running.executor.load_lora(0, adapter)
        error = np.square(running.logits(ids[0].tolist(), adapter=0) - expected).mean()
        assert error <= most * np.square(expected).mean()
        assert error <= 0.05 * change


@pytest.mark.parametrize("kind", ["gptq-4", "awq", "packed-4-zeros", "mxfp4", "nvfp4", "fp8"])
def test_the_cpu_device_rounds_nothing_but_activations(tmp_path: Path, kind: str) -> None:
    quantized(tmp_path, kind)
    kept, floats = (Harness(load(make_device(device), tmp_path)).logits([*range(7, 40)]) for device in ("cpu", "torch"))
    assert 0 < np.square(kept - floats).mean() <= 0.04**2 * np.square(floats).mean()


def test_the_method_of_the_file_may_be_named(tmp_path: Path) -> None:
    expected = quantized(tmp_path, "awq")
    assert served(tmp_path, "torch", quantization="awq") == expected
    with pytest.raises(ModelError, match=r"--quantization gptq names .* this one's is 'awq': leave the option out"):
        served(tmp_path, "cpu", quantization="gptq")


def test_a_gguf_files_own_method_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_model(path)
    assert open_model(EngineOptions(str(path), device="cpu", quantization="gguf")).quantization is None
    with pytest.raises(ModelError, match=r"--quantization awq names .* this one is a GGUF file with .*Q4_0"):
        open_model(EngineOptions(str(path), device="cpu", quantization="awq"))


def test_a_checkpoint_that_is_not_quantized_has_no_method(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--quantization awq .* not quantized: .* one of int8, int8-channel, int4"):
        served(models_zoo.folder("llama", tokenizer=True), "cpu", quantization="awq")


def test_a_quantized_checkpoint_may_be_quantized_again(tmp_path: Path) -> None:
    quantized(tmp_path, "gptq-8")
    assert len(served(tmp_path, "cpu", quantization="int8")) == NUM_TOKENS


def test_experts_in_mxfp4_are_those_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = models_zoo.CASES["gpt-oss"]
    config = {**case.config, "hidden_size": 96, "intermediate_size": 64}
    reference = models_zoo.build(models_zoo.Case(case.model_type, config))
    reference.save_pretrained(tmp_path)
    models_zoo.train_tokenizer().save_pretrained(tmp_path)
    random, tensors = np.random.default_rng(0), {}
    with torch.no_grad():
        for name, weight in reference.state_dict().items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = weight.numpy()
                continue
            experts, inputs, outputs = weight.shape
            parts, values = mxfp4_experts(random, name, experts, outputs, inputs)
            tensors |= parts
            weight.copy_(torch.from_numpy(values).transpose(1, 2))
        ids = torch.tensor([PROMPT])
        generated = reference.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    config = json.loads((tmp_path / "config.json").read_text())
    save(tmp_path, {**config, "quantization_config": MXFP4}, tensors)
    expected = generated[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 3
    assert served(tmp_path, "torch", quantization="mxfp4") == expected
    kept, floats = (Harness(load(make_device(device), tmp_path)).logits([*range(7, 40)]) for device in ("cpu", "torch"))
    assert 0 < np.square(kept - floats).mean() <= 0.04**2 * np.square(floats).mean()
    monkeypatch.setenv("VLLM_CPU_MOE_PREPACK", "0")
    np.testing.assert_array_equal(Harness(load(make_device("cpu"), tmp_path)).logits([*range(7, 40)]), kept)
