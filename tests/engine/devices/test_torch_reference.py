"""What is the torch device's own; what it shares with the others is in tests/engine/models/test_families.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import models_zoo
import numpy as np
import pytest
from harness import Harness, load
from logits import run_with_logits

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.devices.torch_reference import TorchDevice
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.install_hint import install_command
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    MixerSpec,
    ResidualBlockSpec,
    RopeSpec,
    tensor_shapes,
)
from tidewheel.engine.weights import open_weights, read_config
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.tensor import DenseTensor


def test_more_tokens_in_a_pass_give_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    prompts = models_zoo.prompts()
    for name in ("mistral-window", "qwen3", "opt-350m"):
        one = Harness(load(TorchDevice(), models_zoo.folder(name))).generate(prompts, 8)
        with monkeypatch.context() as patch:
            patch.setattr("tidewheel.engine.devices.torch_reference.executor.TorchExecutor.tokens_per_pass", 64)
            many = Harness(load(TorchDevice(), models_zoo.folder(name))).generate(prompts, 8, chunk=11)
        for a, b in zip(one, many, strict=True):
            np.testing.assert_allclose(np.stack(a.logits), np.stack(b.logits), atol=1e-4)


class MadeWeights:
    """Random weights of a spec."""

    dtype: DType = "float32"
    identity = None

    def __init__(self, spec: DecoderSpec) -> None:
        random = np.random.default_rng(5)
        self.arrays = {name: random.standard_normal(shape, np.float32) for name, shape in tensor_shapes(spec).items()}

    def stored_format(self, name: str) -> None: ...

    def __getitem__(self, name: str) -> DenseTensor:
        return DenseTensor(self.arrays[name], "float32")

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)


def model(*mixers: MixerSpec) -> DecoderSpec:
    layer = tuple(ResidualBlockSpec(mixer) for mixer in mixers)
    return DecoderSpec("test", 40, 16, 64, EmbeddingSpec(16), (layer,), None, HeadSpec(tied=True))


def test_sinks_take_a_part_of_the_softmax_and_have_no_value() -> None:
    pytest.importorskip("torch")
    spec = model(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.1, sinks=True))
    weights = MadeWeights(spec)
    options = ExecutorOptions("float32", 1 << 20, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64)
    tokens = [3, 7, 7, 30, 12]
    logits = Harness(TorchDevice().load(spec, weights, options)).logits(tokens)

    array = {name.removeprefix("layers.0."): value.astype(np.float64) for name, value in weights.arrays.items()}
    x = array["embed.weight"][tokens]
    q, k, v = ((x @ array[f"{name}.weight"].T).reshape(5, -1, 8) for name in ("q", "k", "v"))
    k, v = k.repeat(2, axis=1), v.repeat(2, axis=1)
    scores = np.where(np.tri(5, dtype=bool)[:, None], np.einsum("qhd,khd->qhk", q, k) * 0.1, -np.inf)
    parts = np.exp(np.concatenate([scores, np.broadcast_to(array["sinks"][None, :, None], (5, 4, 1))], axis=-1))
    parts /= parts.sum(-1, keepdims=True)
    attended = np.einsum("qhk,khd->qhd", parts[..., :-1], v).reshape(5, 32)
    x = x + attended @ array["o.weight"].T
    np.testing.assert_allclose(logits, x @ array["embed.weight"].T, rtol=1e-4, atol=1e-3)


def test_tokens_see_their_image_and_turn_by_its_rows_and_columns() -> None:
    pytest.importorskip("torch")
    rope = RopeSpec((1.0, 0.5, 0.2, 0.1), axes=(1, 2, 0, 2))
    attention = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=0.1, rope=rope, two_way=True)
    spec = model(replace(attention, sliding_window=4))
    weights = MadeWeights(spec)
    options = ExecutorOptions("float32", 1 << 20, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    # Two tokens of text, an image of two rows and three columns, and a token of text.
    turned_by = np.array(
        [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]], np.int32
    )
    until = np.array([1, 2, 8, 8, 8, 8, 8, 8, 9], np.int32)
    index = np.array([-1, -1, 5, 4, 3, 2, 1, 0, -1], np.int32)
    media = np.random.default_rng(1).standard_normal((6, 32), np.float32)
    tokens = np.array([3, 7, 9, 9, 9, 9, 9, 9, 12], np.int32)
    batch = StepBatch(
        token_ids=tokens,
        positions=np.arange(9, dtype=np.int32),
        query_start=np.array([0, 9], np.int32),
        context_len=np.array([9], np.int32),
        block_tables=np.array([[1]], np.int32),
        logits_rows=np.arange(9, dtype=np.int32),
        sampling=SamplingBatch.greedy(range(1, 10)),
        media_rows=media,
        media_index=index,
        media_layers=np.array([0], np.int32),
        rope_positions=turned_by,
        visible_until=until,
    )
    _, logits = run_with_logits(TorchDevice().load(spec, weights, options), batch)

    array = {name.removeprefix("layers.0."): value.astype(np.float64) for name, value in weights.arrays.items()}
    x, added = array["embed.weight"][tokens], np.zeros((9, 16))
    x[index >= 0], added[index >= 0] = media[::-1, :16], media[::-1, 16:]
    q, k, v = ((x @ array[f"{name}.weight"].T).reshape(9, 2, 8) for name in ("q", "k", "v"))
    turn = np.exp(1j * turned_by[list(rope.axes)].T * np.array(rope.inv_freq))[:, None]
    q, k = ((halves[..., :4] + 1j * halves[..., 4:]) * turn for halves in (q, k))
    scores = np.einsum("qhd,khd->qhk", q, k.conj()).real * 0.1
    key, query = np.arange(9), np.arange(9)[:, None]
    parts = np.exp(np.where(((key < until[:, None]) & (key > query - 4))[:, None], scores, -np.inf))
    parts /= parts.sum(-1, keepdims=True)
    x = x + np.einsum("qhk,khd->qhd", parts, v).reshape(9, 16) @ array["o.weight"].T + added
    np.testing.assert_allclose(logits, x @ array["embed.weight"].T, rtol=1e-4, atol=1e-3)


def test_a_mixer_of_an_unknown_kind_is_refused_by_name() -> None:
    pytest.importorskip("torch")

    @dataclass(frozen=True)
    class Recurrence:
        kind: ClassVar[str] = "recurrence"
        activations: int = 0

        def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
            return {}

    spec = model(AttentionSpec(2, 2, 8, scale=1.0), Recurrence())
    options = ExecutorOptions("float32", 1 << 20, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64)
    with pytest.raises(DeviceError, match="the torch device has no recurrence"):
        TorchDevice().load(spec, MadeWeights(spec), options)


def test_the_dtype_follows_the_checkpoint() -> None:
    assert TorchDevice().default_dtype("bfloat16") == "bfloat16"
    assert TorchDevice().default_dtype("float16") == "float16"


def test_a_cache_without_room_for_a_block_is_refused() -> None:
    pytest.importorskip("transformers")
    folder = models_zoo.folder("llama")
    description = describe(read_config(folder))
    device = TorchDevice()
    # 2 layers, K and V, 2 KV heads of 16 float32
    assert device.kv_bytes_per_token(description.spec, "float32") == 512
    options = ExecutorOptions("float32", 512 * 15, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64)
    with pytest.raises(DeviceError, match="8192 bytes"):
        device.load(description.spec, open_weights(folder, description), options)


def test_a_closed_executor_says_so() -> None:
    pytest.importorskip("transformers")
    executor = load(TorchDevice(), models_zoo.folder("llama"))
    executor.close()
    with pytest.raises(DeviceError, match="closed"):
        executor.copy_blocks(np.zeros((0, 2), np.int32))


def test_without_torch_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import (
    AttentionSpec,
    ResidualBlockSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    MixerSpec,
    tensor_shapes,
)
try:
    get_device("torch").load(None, None, ExecutorOptions("float32", 1, 1, 1, 1))
except DeviceError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_command("torch") in result.stdout


def test_describing_and_reading_a_model_imports_neither_torch_nor_transformers() -> None:
    code = """
import sys
import tidewheel.engine.devices, tidewheel.engine.devices.torch_reference
import tidewheel.engine.models.generation, tidewheel.engine.weights
print([name for name in ("torch", "transformers", "huggingface_hub") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
