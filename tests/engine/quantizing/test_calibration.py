"""The statistics of inputs are those that transformers' modules are given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
import pytest
from cores import one_core
from numpy.typing import NDArray
from optional_packages import require_packages

from tidewheel.engine.devices.cpu.executor import CpuExecutor
from tidewheel.engine.loading.opened_model import OpenedModel, open_model
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.quantizing.calibration import TextCalibration
from tidewheel.server.options.model import engine_options

pytest.importorskip("tidewheel._native")
torch = pytest.importorskip("torch")
require_packages("transformers")

LENGTHS = (150, 1, 40)  # the first is computed in two pieces


@pytest.fixture
def windows() -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, models_zoo.VOCAB_SIZE, length, np.int32) for length in LENGTHS]


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[tuple[OpenedModel, CpuExecutor]]:
    options = engine_options({"model": str(folder), "dtype": "float32", "threads_bind": one_core()})
    opened = open_model(options)
    executor = opened.load(
        options, kv_cache_bytes=64 << 20, max_model_len=max(LENGTHS), max_num_seqs=1, max_num_batched_tokens=128
    )
    with contextlib.closing(executor):
        assert isinstance(executor, CpuExecutor)
        yield opened, executor


def keep(rows: list[NDArray[np.float32]], _: Any, given: tuple[Any, ...]) -> None:
    rows.append(given[0].detach().numpy()[0])


def matrices(opened: OpenedModel) -> list[str]:
    return [name for name, shape in tensor_shapes(opened.spec).items() if len(shape) == 2]


@pytest.mark.parametrize("name", ["llama-bias", "gemma3", "gpt2", "minicpm3", "qwen3_next"])
def test_they_are_those_of_transformers(name: str, windows: list[NDArray[np.int32]]) -> None:
    model = models_zoo.model(name)
    with loaded(models_zoo.folder(name)) as (opened, executor):
        modules = {}
        for matrix in matrices(opened):
            module = opened.description.tensors[matrix].name.removesuffix(".weight")
            with contextlib.suppress(AttributeError):
                modules[matrix] = model.get_submodule(module)
        seen: dict[str, list[NDArray[np.float32]]] = {matrix: [] for matrix in modules}
        hooks = [
            module.register_forward_pre_hook(functools.partial(keep, seen[matrix]))
            for matrix, module in modules.items()
        ]
        with torch.no_grad():
            for window in windows:
                model(torch.from_numpy(window[None]))
        for hook in hooks:
            hook.remove()
        done: list[tuple[int, int]] = []
        calibration = TextCalibration(executor, windows, lambda computed, whole: done.append((computed, whole)))
        found = calibration.gather(modules, grams=True)
    assert done == [(128, 191), (150, 191), (151, 191), (191, 191)]
    assert len(found) >= 8
    for matrix, statistics in found.items():
        rows = np.concatenate(seen[matrix]).astype(np.float64)
        assert statistics.count == sum(LENGTHS)
        np.testing.assert_allclose(statistics.squares, (rows**2).mean(0), rtol=1e-3, atol=1e-6)
        assert statistics.gram is not None
        gram = rows.T @ rows / len(rows)
        np.testing.assert_allclose(statistics.gram, gram, rtol=1e-3, atol=1e-4 * gram.max())


def test_each_expert_has_those_of_its_own_tokens(windows: list[NDArray[np.int32]]) -> None:
    with loaded(models_zoo.folder("mixtral")) as (opened, executor):
        found = TextCalibration(executor, windows, lambda *_: None).gather(matrices(opened))
    for layer in ("layers.0.", "layers.1."):
        router = found[f"{layer}router.weight"]
        experts = [found[f"{layer}experts.{expert}.up.weight"] for expert in range(4)]
        assert sum(expert.count for expert in experts) == 2 * router.count == 2 * sum(LENGTHS)
        assert [found[f"{layer}experts.{e}.down.weight"].count for e in range(4)] == [e.count for e in experts]
        squares = sum(expert.squares * np.float32(expert.count) for expert in experts) / np.float32(router.count)
        np.testing.assert_allclose(squares, 2 * router.squares, rtol=1e-5)


def test_what_is_not_computed_is_left_out(windows: list[NDArray[np.int32]]) -> None:
    with loaded(models_zoo.folder("mixtral")) as (opened, executor):
        found = TextCalibration(executor, [windows[1]], lambda *_: None).gather(matrices(opened))
    assert sum(name.startswith("layers.0.experts.") and name.endswith(".up.weight") for name in found) == 2  # of 4
    assert "embed.weight" not in found


def test_a_name_that_is_no_matrix_is_refused(windows: list[NDArray[np.int32]]) -> None:
    with loaded(models_zoo.folder("llama")) as (_, executor):
        calibration = TextCalibration(executor, windows, lambda *_: None)
        with pytest.raises(ValueError, match=r"the model has no matrix layers\.9\.q\.weight"):
            calibration.gather(["layers.9.q.weight"])
