"""Loading a model in the background: what fails is said, and nothing of it is left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tidewheel.engine.cancellation import Cancellation, LoadCancelledError
from tidewheel.engine.devices.base import Capabilities, Device
from tidewheel.engine.devices.cache_split import GroupBytes
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorLimits, ExecutorOptions
from tidewheel.engine.devices.load_plan import LoadPlan, dense_plan
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.loading import opened_model
from tidewheel.engine.loading.load import EngineLoad, load_engine
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models import ModelDescription
from tidewheel.engine.models.generation import GenerationConfig
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import TokenizersBackend
from tidewheel.engine.weights.dtypes import DType, KvCacheDType
from tidewheel.engine.weights.dummy import DummyWeights
from tidewheel.engine.weights.quantization import Quantization
from tidewheel.engine.weights.tensor import WeightSource

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


class LoadedNothing:
    """An executor that only knows whether it was closed."""

    limits = ExecutorLimits(16, 64, max_num_seqs=8, max_num_batched_tokens=64)
    closed = False

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        progress(2, 2)

    def close(self) -> None:
        self.closed = True


class ScriptedDevice(Device):
    """Its loads last until `may_finish` is set or they are cancelled. If there is a `failure`, that is how they end."""

    name = "torch"  # whose kinds of mixers it has
    capabilities = Capabilities()

    def __init__(self) -> None:
        self.executor = LoadedNothing()
        self.weights: WeightSource | None = None
        self.quantization: Quantization | None = None
        self.failure: Exception | None = None
        self.may_finish = threading.Event()
        self.cancelled = False

    def default_dtype(self, checkpoint: DType) -> DType:
        return checkpoint

    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        return dense_plan(spec, dtype, quantization)

    def kv_group_bytes(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> list[GroupBytes]:
        return [GroupBytes(None, 1024)]

    def load(
        self, spec: DecoderSpec, weights: WeightSource, options: ExecutorOptions, cancellation: Cancellation
    ) -> Executor:
        self.weights, self.quantization = weights, options.quantization
        with cancellation.calling(self.may_finish.set):
            assert self.may_finish.wait(60)
        try:
            cancellation.check()
        except LoadCancelledError:
            self.cancelled = True
            raise
        if self.failure is not None:
            raise self.failure
        return self.executor  # type: ignore[return-value]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ScriptedDevice:
    scripted = ScriptedDevice()
    monkeypatch.setattr(opened_model, "get_device", lambda *_: scripted)
    return scripted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(path / "tokenizer.json"))
    return path


def options(folder: Path) -> EngineOptions:
    return EngineOptions(str(folder), load_format="dummy")


def loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


def test_the_caller_is_free_while_the_weights_are_loaded(device: ScriptedDevice, folder: Path) -> None:
    with EngineLoad(options(folder)) as load:
        assert len(loading_threads()) == 1
        device.may_finish.set()
        engine = load.engine()
    assert engine.model_name == str(folder)
    assert not device.cancelled
    assert not device.executor.closed
    assert not loading_threads()


@pytest.mark.parametrize("chunked", [False, True])
def test_prompts_that_run_whole_bound_the_context_which_is_said(
    chunked: bool, device: ScriptedDevice, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device.executor.limits = ExecutorLimits(16, 64, 8, 64, chunked_prefill=chunked)
    device.may_finish.set()
    engine = load_engine(options(folder))
    assert engine.max_model_len == (512 if chunked else 64)
    said = "The context is cut from 512 tokens to 64: the torch device runs prompts whole"
    assert (said in caplog.text) == (not chunked)


@pytest.mark.parametrize("quantizes", [False, True])
def test_what_is_said_of_the_weights_is_how_the_device_stores_them(
    quantizes: bool, device: ScriptedDevice, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device.capabilities = Capabilities(quantizes=("int8",) if quantizes else ())
    device.may_finish.set()
    asked = replace(options(folder), quantization="int8")
    with caplog.at_level("INFO"):
        engine = load_engine(asked)
    assert engine.info["quantization"] == ("int8" if quantizes else "")
    assert f"llama, {'int8' if quantizes else 'float32'} on torch" in caplog.text
    said = "--quantization int8 has no effect on the torch device: weights are kept, and take memory, as float32"
    assert caplog.text.count(said) == (0 if quantizes else 1)
    plain = open_model(options(folder)).weight_bytes
    assert (open_model(asked).weight_bytes < plain) == quantizes
    assert device.quantization == (Quantization("int8") if quantizes else None)


def test_a_method_of_other_devices_is_refused_with_those_of_this_one(device: ScriptedDevice, folder: Path) -> None:
    device.capabilities = Capabilities(quantizes=("int8", "q8_0"))
    with pytest.raises(DeviceError, match=r"torch device does not quantize to fp8: take --quantization .* int8, q8_0"):
        open_model(replace(options(folder), quantization="fp8"))


class OneFile:
    """A model that is no folder."""

    def __init__(self, generation: GenerationConfig) -> None:
        self.config = CONFIG
        self.tokenizer_of_the_file = Tokenizer(TokenizersBackend(tokenizers.Tokenizer(tokenizers.models.BPE())))
        self.weights_of_the_file: WeightSource | None = None
        self._generation = generation

    def generation(self, config: Mapping[str, Any] | None = None) -> GenerationConfig:
        return self._generation

    def tokenizer(self) -> Tokenizer:
        return self.tokenizer_of_the_file

    def weights(self, description: ModelDescription, config: Mapping[str, Any] | None = None) -> WeightSource:
        self.weights_of_the_file = DummyWeights(description.spec, "bfloat16")
        return self.weights_of_the_file


def test_a_model_may_be_something_else_than_a_folder(device: ScriptedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    source = OneFile(GenerationConfig(eos_token_ids=(7,), top_k=3, origin="model.one"))
    monkeypatch.setattr(opened_model, "open_source", lambda *args, **named: source)
    device.may_finish.set()
    engine = load_engine(EngineOptions("model.one"))
    assert engine.tokenizer is source.tokenizer_of_the_file
    assert engine.generation_defaults == {"top_k": 3}
    assert device.weights is not None
    assert source.weights_of_the_file is not None
    name = "layers.0.q.weight"
    np.testing.assert_array_equal(device.weights[name].data, source.weights_of_the_file[name].data)  # type: ignore[union-attr]
    assert engine.info["dtype"] == "bfloat16"

    source = OneFile(GenerationConfig(top_k=-2, origin="model.one"))
    with pytest.raises(ModelError, match=r"^model\.one: top_k must be"):
        load_engine(EngineOptions("model.one"))


def test_weights_that_cannot_be_loaded_are_the_error_of_the_start(device: ScriptedDevice, folder: Path) -> None:
    device.failure = DeviceError("no such kernel")
    device.may_finish.set()
    with pytest.raises(DeviceError, match="no such kernel"):
        load_engine(options(folder))
    assert not loading_threads()


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_tokenizer_that_cannot_be_read_gives_the_load_up(
    device: ScriptedDevice, folder: Path, content: bytes | None
) -> None:
    if content is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_engine(options(folder))
    assert device.cancelled
    assert not loading_threads()


def test_the_tokenizer_is_the_error_if_both_cannot_be_loaded(device: ScriptedDevice, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"{}")
    device.failure = DeviceError("no such kernel")
    device.may_finish.set()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_engine(options(folder))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_caller_that_fails_meanwhile_gives_the_load_up(
    device: ScriptedDevice, folder: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), EngineLoad(options(folder)):
        raise error
    assert device.cancelled
    assert not loading_threads()


def test_ctrl_c_while_the_load_begins_gives_it_up(
    device: ScriptedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        original(thread)
        started.append(thread)
        raise KeyboardInterrupt

    original = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), EngineLoad(options(folder)):
        pass
    (thread,) = started
    thread.join(60)
    assert not thread.is_alive()
    assert device.cancelled


def test_a_caller_that_fails_with_the_engine_closes_it(device: ScriptedDevice, folder: Path) -> None:
    device.may_finish.set()

    def fail_with_the_engine() -> None:
        with EngineLoad(options(folder)) as load:
            load.engine()
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        fail_with_the_engine()
    assert device.executor.closed


def test_a_load_whose_engine_nobody_takes_is_closed(device: ScriptedDevice, folder: Path) -> None:
    with EngineLoad(options(folder)):
        device.may_finish.set()
    assert device.cancelled or device.executor.closed
    assert not loading_threads()


def test_a_cancellation_calls_what_it_is_given_once_and_only_in_its_context() -> None:
    calls: list[str] = []
    cancellation = Cancellation()
    with cancellation.calling(lambda: calls.append("left")):
        cancellation.check()
    with cancellation.calling(lambda: calls.append("early")):
        cancellation.cancel()
        cancellation.cancel()
    with cancellation.calling(lambda: calls.append("late")):
        pass
    assert calls == ["early", "late"]
    with pytest.raises(LoadCancelledError):
        cancellation.check()
