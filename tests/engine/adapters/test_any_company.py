"""A request's tokens depend on the request and its adapter alone, to the bit, on every level and any threads."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_files
import pytest
from engine.driving import Job, check_any_company
from harness import device_ids, make_device
from hypothesis import strategies as st

from tidewheel.engine.adapters.long_context import LongContexts
from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions, LoraLimits
from tidewheel.engine.models import describe
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.quantization import Quantization

LONG = LongContexts(256, (4.0,))
LORAS = [Lora(number, f"digest {number}") for number in range(3)]
# What each changes of the embedding and the head.
WHOLE: list[Callable[[], dict[str, Any]]] = [
    dict,
    lambda: lora_files.embedding(1) | lora_files.head_of_its_own(1) | lora_files.biases(1),
    lambda: (
        lora_files.biases(2, "mlp.down_proj", "self_attn.k_proj")
        | lora_files.head(2)
        | lora_files.embedding_of_its_own(2)
    ),
]


@functools.cache
def executor(device_id: str, threads: int, quantization: str | None, folder: Path) -> Executor:
    native: Any = importlib.import_module("tidewheel._native")
    cpus = [processor["cpu"] for processor in native.topology()["processors"]][:threads]
    source = open_source(str(folder / "model"), load_format="dummy", seed=3)
    description = describe(source.config, None)
    device = make_device(device_id, ",".join(map(str, cpus)) if device_id != "torch" else None)
    options = ExecutorOptions(
        dtype="float32",
        kv_cache_bytes=64 * 16 * device.kv_bytes_per_token(description.spec, "float32"),
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        quantization=None if quantization is None else Quantization("int8"),
        lora=LoraLimits(max_loras=2, max_rank=4, dtype="bfloat16"),
    )
    weights = source.weights(description)
    made = device.load(description.spec, weights, options)
    for lora in LORAS:
        made.load_lora(lora.number, read_peft_folder(folder / str(lora.number), description, 4, weights, LONG))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dummy_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    (root / "model").symlink_to(dummy_llama)
    for lora in LORAS:
        content = lora_files.tensors(lora.number) | WHOLE[lora.number]()
        config = {"modules_to_save": ["embed_tokens", "lm_head"], "context_length": 1024 if lora.number == 2 else None}
        lora_files.write(root / str(lora.number), content, **config)
    return root


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stem, tail = draw(st.integers(0, 40)), draw(st.lists(st.integers(4, 255), min_size=1, max_size=4))
    sampling = SamplingParams(
        max_tokens=draw(st.sampled_from([1, 4, 20])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        n=draw(st.sampled_from([1, 1, 3])),
        logprobs=draw(st.sampled_from([None, 5])),
    )
    prompt = (*((7 * i) % 250 + 4 for i in range(stem)), *tail)
    priority = draw(st.sampled_from([0, 0, 1]))
    return Job(prompt, sampling, draw(st.integers(0, 99)), priority, lora=draw(st.sampled_from([None, *LORAS])))


_BEST, *_OTHERS = [device for device in device_ids() if device != "torch"]
_SUBJECTS = [
    (_BEST, 2, None),
    (_BEST, 2, "int8"),
    pytest.param(_BEST, 1, None, marks=pytest.mark.sweep),
    *((level, 1, None) for level in _OTHERS),
    *(pytest.param(level, 2, None, marks=pytest.mark.sweep) for level in _OTHERS),
]


@pytest.mark.parametrize(("device", "threads", "quantization"), _SUBJECTS)
def test_any_company_gives_the_same_bits(device: str, threads: int, quantization: str | None, folder: Path) -> None:
    if len(importlib.import_module("tidewheel._native").topology()["processors"]) < threads:
        pytest.skip(f"this machine has no {threads} processors")
    check_any_company(
        executor(device, threads, quantization, folder),
        executor(device, 1, quantization, folder),
        jobs(),
        max_length=64,
        eos_ids=frozenset({0, 1, 2, 3}),
        num_blocks=st.integers(4, 12),
        num_batched_tokens=st.sampled_from([8, 13, 128]),
        max_examples=5,
    )
