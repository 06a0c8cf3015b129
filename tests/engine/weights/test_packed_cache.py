"""Packed weights on disk: the same weights to the bit, taken only for what they were packed from, never in the way."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
import pytest
import waiting
from harness import Harness
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights import open_weights, read_config
from tidewheel.engine.weights.checkpoint import CheckpointWeights
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.packed_cache import PackedCache
from tidewheel.engine.weights.quantization import Quantization

_native = pytest.importorskip("tidewheel._native")
from tidewheel.engine.devices.cpu.device import CpuDevice  # noqa: E402
from tidewheel.engine.devices.cpu.executor import CpuExecutor  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 72,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 20,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def save_checkpoint(folder: Path, seed: int = 0) -> None:
    random, what = np.random.default_rng(seed), describe(CONFIG)
    shapes = tensor_shapes(what.spec)
    tensors = {what.tensors[name].name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_checkpoint(path)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "weights"  # neither folder exists yet


def load(
    folder: Path,
    cache: Path | None,
    quantization: Quantization | None = None,
    dtype: DType = "bfloat16",
    isa: str = "auto",
    threads_bind: str = "auto",
) -> CpuExecutor:
    what = describe(read_config(folder))
    options = ExecutorOptions(
        dtype=dtype,
        kv_cache_bytes=2**22,
        max_model_len=64,
        max_num_seqs=len(PROMPT),  # bounds the rows whose logits one step gives
        max_num_batched_tokens=64,
        quantization=quantization,
    )
    own = CpuOptions(threads_bind=threads_bind, cache_dir=None if cache is None else str(cache))
    return CpuDevice(own, isa=isa).load(what.spec, open_weights(folder, what), options)


def logits(executor: CpuExecutor) -> NDArray[np.float32]:
    result = Harness(executor).logits(PROMPT)
    executor.close()
    return result


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.packed"))


wait_until = partial(waiting.wait_until, timeout_s=20, every_s=0.002)


def fill(folder: Path, cache: Path, **options: Any) -> NDArray[np.float32]:
    """Load as `options` say and wait for a new entry. Returns what the model computes."""
    before = entries(cache)
    executor = load(folder, cache, **options)
    wait_until(lambda: entries(cache) != before)
    return logits(executor)


@pytest.fixture
def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def read(self: CheckpointWeights, name: str) -> None:
        raise AssertionError(f"{name} was read from the checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWeights, "__getitem__", read)
        yield


FORMATS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"quantization": Quantization("int8")},
    {"quantization": Quantization("int8-channel")},
    {"quantization": Quantization("int4-fast")},
    {"quantization": Quantization("int4-fast", 64)},
    {"quantization": Quantization("int4-fast", 32, True)},
    {"isa": "scalar"},
]


@pytest.mark.parametrize("options", FORMATS, ids=lambda options: str(*options.values()))
def test_the_second_load_gives_the_same_logits_without_the_checkpoint(
    folder: Path, cache: Path, options: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = fill(folder, cache, **options)
    wait_until(lambda: "Kept packed weights" in caplog.text)
    np.testing.assert_array_equal(logits(load(folder, None, **options)), expected)
    request.getfixturevalue("no_checkpoint")
    np.testing.assert_array_equal(logits(load(folder, cache, **options)), expected)
    assert f"Loaded packed weights from {entries(cache)[0]}" in caplog.text


def test_what_one_group_of_threads_packed_several_take_and_the_other_way_round(
    folder: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    cpus = [processor["cpu"] for processor in _native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("this machine has one processor")
    one, two = f"{cpus[0]},{cpus[1]}", f"{cpus[0]}|{cpus[1]}"
    other = cache.with_name("other")
    expected = fill(folder, cache, threads_bind=one)
    np.testing.assert_array_equal(fill(folder, other, threads_bind=two), expected)
    [file], [same] = entries(cache), entries(other)
    assert file.read_bytes() == same.read_bytes()
    request.getfixturevalue("no_checkpoint")
    np.testing.assert_array_equal(logits(load(folder, cache, threads_bind=two)), expected)
    np.testing.assert_array_equal(logits(load(folder, other, threads_bind=one)), expected)


def test_every_format_level_and_version_has_an_entry_of_its_own(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in FORMATS:
        if options == {"isa": "scalar"} and _native.chosen_isa_level() == "scalar":
            continue
        fill(folder, cache, **options)
    monkeypatch.setattr(_native, "packed_version", lambda: 10**6)
    fill(folder, cache)
    assert len(list(cache.iterdir())) == len(entries(cache))


def test_a_changed_checkpoint_is_packed_anew(folder: Path, cache: Path) -> None:
    file = folder / "model.safetensors"
    old_logits, old_status = fill(folder, cache), file.stat()
    save_checkpoint(folder, seed=1)
    # As a tool that copies times leaves it: same path, same size, same modification time.
    os.utime(file, ns=(old_status.st_atime_ns, old_status.st_mtime_ns))
    assert file.stat().st_size == old_status.st_size
    new_logits = fill(folder, cache)
    assert not np.array_equal(new_logits, old_logits)
    np.testing.assert_array_equal(logits(load(folder, None)), new_logits)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "header": lambda path: flip(path, 20),
    "first weight": lambda path: flip(path, 4096),
    "last weights": lambda path: flip(path, path.stat().st_size - 70),
    "foreign": lambda path: path.write_bytes(b"#!/bin/sh\n" * 1000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_ignored_and_written_anew(
    folder: Path, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    # int4 has padding that packing leaves as it is: nothing of the damaged file may stay there.
    options = {"quantization": Quantization("int4-fast", 128)}
    expected = fill(folder, cache, **options)
    (entry,) = entries(cache)
    good = entry.read_bytes()
    DAMAGES[damage](entry)
    executor = load(folder, cache, **options)
    assert "cannot be used and will be replaced" in caplog.text
    wait_until(lambda: entry.read_bytes() == good)
    np.testing.assert_array_equal(logits(executor), expected)


def test_an_entry_of_another_key_is_not_taken(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(folder, cache)
    (first,) = entries(cache)
    expected = fill(folder, cache, quantization=Quantization("int8"))
    (second,) = set(entries(cache)) - {first}
    second.write_bytes(first.read_bytes())
    np.testing.assert_array_equal(logits(load(folder, cache, quantization=Quantization("int8"))), expected)
    assert "it holds other weights" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = load(folder, folder / "config.json" / "cache")
    wait_until(lambda: "could not be kept for the next start" in caplog.text)
    np.testing.assert_array_equal(logits(executor), logits(load(folder, None)))


def test_pipes_in_the_place_of_its_files_keep_nobody_waiting(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(folder, cache)
    wait_until(lambda: "Kept packed weights" in caplog.text)
    (entry,) = cache.iterdir()
    entry.unlink()
    for path in (entry, entry.with_suffix(".tmp")):
        os.mkfifo(path)
    executor = load(folder, cache)
    assert "cannot be used and will be replaced" in caplog.text
    wait_until(lambda: "could not be kept for the next start" in caplog.text)
    executor.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    executor = load(folder, closed)
    wait_until(lambda: "could not be kept for the next start" in caplog.text)
    executor.close()


def test_a_disk_that_is_full_is_a_warning_and_keeps_nothing(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        executor = load(folder, cache)
        wait_until(lambda: "could not be kept for the next start" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    executor.close()
    assert list(cache.iterdir()) == []
    fill(folder, cache)


def test_those_who_start_together_do_not_clash(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(folder, None))
    results: list[NDArray[np.float32]] = []

    def start() -> None:
        executor = load(folder, cache)
        wait_until(lambda: entries(cache))
        results.append(logits(executor))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(threads)
    for result in results:
        np.testing.assert_array_equal(result, expected)
    assert list(cache.iterdir()) == entries(cache)
    assert len(entries(cache)) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    np.testing.assert_array_equal(logits(load(folder, cache)), expected)


class FakeWeights:
    """Bytes in place of a model, in two runs: what a cache asks of one."""

    def __init__(self, size: int) -> None:
        self._bytes = np.arange(size).astype(np.uint8)

    def packed_weights(self) -> list[NDArray[np.uint8]]:
        return [self._bytes[:1000], self._bytes[1000:]]

    def weights_checksum(self) -> int:
        return 7

    def read_weights(self, file: int, offset: int, checksum: int) -> bool:
        content = os.pread(file, self._bytes.nbytes + 1, offset)
        return content == self._bytes.tobytes() and checksum == 7


def test_what_another_is_writing_is_left_to_it_and_what_a_killed_one_left_is_used_up(
    cache: Path,
) -> None:
    native = FakeWeights(100_000)
    kept = PackedCache(str(cache), ["a model"])
    temporary = kept.path.with_suffix(".tmp")
    cache.mkdir(parents=True)
    with temporary.open("wb") as file:
        file.write(b"half of it" * 50_000)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        kept.write(native, threading.Event())
        assert [path.name for path in cache.iterdir()] == [temporary.name]
    kept.write(native, threading.Event())
    assert list(cache.iterdir()) == [kept.path]
    assert kept.read(native)


_WRITES_HALF = """
import sys, threading, time
import numpy as np
from tidewheel.engine.weights.packed_cache import PackedCache

class Weights:
    def __init__(self):
        self.are_counted = False

    def packed_weights(self):
        whole = np.arange(100_000).astype(np.uint8)
        yield whole[:1000]
        if self.are_counted:
            print("half", flush=True)
            time.sleep(60)
        yield whole[1000:]
        self.are_counted = True

    def weights_checksum(self):
        return 7

PackedCache(sys.argv[1], ["a model"]).write(Weights(), threading.Event())
"""


def test_a_process_that_was_killed_while_it_wrote_harms_nothing(cache: Path) -> None:
    native, kept = FakeWeights(100_000), PackedCache(str(cache), ["a model"])
    command = [sys.executable, "-c", _WRITES_HALF, str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.kill()
    half = kept.path.with_suffix(".tmp")
    assert (list(cache.iterdir()), half.stat().st_size) == ([half], 4096 + 1000)
    assert not kept.read(native)
    kept.write(native, threading.Event())
    assert list(cache.iterdir()) == [kept.path]
    assert kept.read(native)


def test_a_write_that_is_stopped_leaves_nothing(cache: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    PackedCache(str(cache), ["a model"]).write(FakeWeights(100_000), stopped)
    assert list(cache.iterdir()) == []


def test_nothing_is_kept_unless_asked_for(folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    load(folder, None).close()
    assert sorted(tmp_path.rglob("*")) == before


def test_the_engine_takes_the_folder_and_random_weights_are_not_kept(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    caplog.set_level(logging.INFO)
    model = str(models_zoo.folder("llama", tokenizer=True))
    options = {"max_model_len": 64, "max_num_seqs": 2, "device_options": (CpuOptions(cache_dir=str(cache)),)}
    dummy = load_engine(EngineOptions(model, load_format="dummy", **options))  # type: ignore[arg-type]
    asyncio.run(dummy.stop())
    assert not cache.exists()
    first = load_engine(EngineOptions(model, **options))  # type: ignore[arg-type]
    wait_until(lambda: entries(cache))
    asyncio.run(first.stop())
    second = load_engine(EngineOptions(model, **options))  # type: ignore[arg-type]
    asyncio.run(second.stop())
    assert "Loaded packed weights from" in caplog.text
