"""Loading onto the CPU: memory that is given back, and loads that are given up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tidewheel.engine.cancellation import Cancellation, LoadCancelledError
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import open_weights
from tidewheel.engine.weights.checkpoint import CheckpointWeights
from tidewheel.engine.weights.tensor import DenseTensor

pytest.importorskip("tidewheel._native")
from tidewheel import _native
from tidewheel.engine.devices.cpu.device import CpuDevice

WHAT = describe({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
})  # fmt: skip
OPTIONS = ExecutorOptions(
    dtype="float32", kv_cache_bytes=2**22, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpu-load")
    random = np.random.default_rng(0)
    shapes = tensor_shapes(WHAT.spec)
    tensors = {WHAT.tensors[name].name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return path


class MadeWeights:
    """A checkpoint whose tensors are copies, made as they are asked for. A callback gets each of them."""

    identity: str | None = None

    def __init__(self, folder: Path) -> None:
        self._weights = open_weights(folder, WHAT)
        self.dtype = self._weights.dtype
        self.asked: list[str] = []
        self.cancel_at = 0
        self.cancellation = Cancellation()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def stored_format(self, name: str) -> None: ...

    def __getitem__(self, name: str) -> DenseTensor:
        self.asked.append(name)
        if len(self.asked) == self.cancel_at:
            self.cancellation.cancel()
        return DenseTensor(self._weights[name].data.copy(), self.dtype)


def resident_bytes(path: Path) -> int:
    """How much of a mapped file is in this process's memory."""
    resident, within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0]:
            within = line.endswith(str(path))
        elif within and name == "Rss":
            resident += int(value.split()[0]) * 1024
    return resident


def test_a_checkpoint_is_not_in_memory_beside_the_packed_model(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = open_weights(folder, WHAT)
    total = sum(int(weights[name].data.astype(np.float64).size) for name in weights)  # which reads them all
    assert resident_bytes(path) > 2 * total
    executor = CpuDevice().load(WHAT.spec, weights, OPTIONS)
    # Pages near to those that are read come with them, and so may some that were given back.
    assert resident_bytes(path) < 0.2 * path.stat().st_size
    executor.close()


def test_given_back_memory_can_be_read_again(folder: Path) -> None:
    weights = open_weights(folder, WHAT)
    before = {name: weights[name].data.copy() for name in weights}
    CpuDevice().load(WHAT.spec, weights, OPTIONS).close()
    assert all(np.array_equal(weights[name].data, data) for name, data in before.items())


def test_weights_that_are_made_as_they_are_asked_for_are_packed_alike(folder: Path) -> None:
    mapped = CpuDevice().load(WHAT.spec, open_weights(folder, WHAT), OPTIONS)
    made = CpuDevice().load(WHAT.spec, MadeWeights(folder), OPTIONS)
    assert all(map(np.array_equal, mapped.native.packed_weights(), made.native.packed_weights()))
    mapped.close()
    made.close()


@pytest.mark.parametrize("kept", [False, True])
def test_a_cancelled_load_packs_nothing(folder: Path, tmp_path: Path, kept: bool) -> None:
    device = CpuDevice(CpuOptions(cache_dir=str(tmp_path)))
    if kept:
        executor = device.load(WHAT.spec, open_weights(folder, WHAT), OPTIONS)
        while not list(tmp_path.glob("*.packed")):
            time.sleep(0.01)
        executor.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == kept
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(LoadCancelledError):
        device.load(WHAT.spec, open_weights(folder, WHAT), OPTIONS, cancellation)
    assert sorted(tmp_path.iterdir()) == files


def test_a_load_that_is_cancelled_on_its_way_asks_for_no_more_weights(folder: Path) -> None:
    weights = MadeWeights(folder)
    weights.cancel_at = 3
    with pytest.raises(LoadCancelledError):
        CpuDevice().load(WHAT.spec, weights, OPTIONS, weights.cancellation)
    assert len(weights.asked) == 3


def test_a_weight_of_another_shape_is_named_before_anything_is_packed(folder: Path) -> None:
    class Misshapen(CheckpointWeights):
        def __getitem__(self, name: str) -> DenseTensor:
            tensor = super().__getitem__(name)
            return dataclasses.replace(tensor, data=tensor.data[:-1]) if name == "layers.2.q.weight" else tensor

    weights = open_weights(folder, WHAT)
    assert isinstance(weights, CheckpointWeights)
    weights.__class__ = Misshapen
    with pytest.raises(DeviceError, match=r"layers\.2\.q\.weight must have the shape \[512, 512\], not \[511, 512\]"):
        CpuDevice().load(WHAT.spec, weights, OPTIONS)


def test_a_core_is_lent_where_none_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("yield_core", "reclaim_core"):
        monkeypatch.setattr(_native.ThreadPool, name, lambda threads, name=name: calls.append(name))
    cpus = [str(processor["cpu"]) for processor in _native.topology()["processors"]]
    for bound in {cpus[0], ",".join(cpus)}:
        device = CpuDevice(CpuOptions(threads_bind=bound))
        executor = device.load(WHAT.spec, open_weights(folder, WHAT), OPTIONS)
        assert executor.yield_core(7) is None  # so few are sooner passed on than a core is lent
        if (passed_on := executor.yield_core(8)) is not None:
            passed_on()
            late = executor.yield_core(8)
            executor.close()
            assert late is not None
            late()  # the last tokens of a server that ends
        executor.close()
    assert calls == ["yield_core", "reclaim_core"] * 2  # other models may have the same threads
