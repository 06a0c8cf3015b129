"""Models that change places often: their packed weights are kept in --cache-dir all the same."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from server.hosting.conftest import StartHost
from server.waiting import eventually

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.weights import read_config
from tidewheel.engine.weights.checkpoint import CheckpointWeights
from tidewheel.engine.weights.packed_cache import PackedCache, PackedWeights


def save_weights(folder: Path) -> None:
    random, what = np.random.default_rng(1), describe(read_config(folder))
    shapes = tensor_shapes(what.spec)
    tensors = {what.tensors[name].name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def test_a_model_that_is_unloaded_at_once_is_packed_only_once(
    start_host: StartHost, dummy_model: Path, other_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PackedCache.write

    def write_late(self: PackedCache, weights: PackedWeights, stopped: threading.Event) -> None:
        time.sleep(0.2)
        write(self, weights, stopped)

    monkeypatch.setattr(PackedCache, "write", write_late)
    stored = shutil.copytree(dummy_model, tmp_path / "stored")
    save_weights(stored)
    cache = tmp_path / "cache"
    cache.mkdir()
    models = ("--model", f"stored={stored}", "--model", f"other={other_model}")
    host = start_host(*models, "--cache-dir", str(cache), "--max-model-len", "64")

    def ask() -> None:
        body = {"model": "stored", "prompt": "x", "max_tokens": 2, "keep_alive": 0}
        answer = host.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        eventually(lambda: not [*host.models.loaded], "it was never unloaded")

    def read(self: CheckpointWeights, name: str) -> None:
        raise AssertionError(f"{name} was read from the checkpoint")

    ask()
    eventually(lambda: [path.suffix for path in cache.iterdir()] == [".packed"], "its weights were not kept")
    monkeypatch.setattr(CheckpointWeights, "__getitem__", read)
    ask()
