"""TaskAdapters: the low-rank updates of a model's tasks (https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..devices.tower import Rows
from ..models.spec import TowerSpec, tower_shapes
from ..models.spec.shapes import Shapes
from ..weights.finite import require_finite
from ..weights.lora import LoraAdapter, LowRankUpdate
from ..weights.stored import Stored
from ..weights.tensor import DenseTensor, to_float32
from ..weights.tower import TowerWeights
from .model import EncoderModel, TasksSpec


class TaskAdapters:
    """Those of the tower's matrices, and of the tables of words and types, whose rows are looked up here."""

    def __init__(self, checkpoint: Stored, model: EncoderModel, tasks: TasksSpec, threads: int) -> None:
        """Raises ModelError for tensors that are missing, do not fit or have values that are not finite."""
        self._tasks, self._scale = tasks, np.float32(tasks.scale)
        shapes = {**_of_matrices(tasks, model.tower), **_of_tables(tasks, model)}
        stored = tuple((f"{t}.{name}", shape) for t in range(len(tasks.prompts)) for name, shape in shapes.items())
        refs = {
            f"{t}.{name}": tuple(replace(ref, index=t) for ref in model.tensors[name])
            for t in range(len(tasks.prompts))
            for name in shapes
        }
        self._weights = TowerWeights(checkpoint, TowerSpec(model.tower.hidden_size, (), tables=stored), refs)
        self.stored_names = self._weights.stored_names
        self._outputs = {name: shape[0] for name, shape in tower_shapes(model.tower).items()}
        self._tables: dict[str, DenseTensor] = {}
        tables = _of_tables(tasks, model)
        for name in self._weights:
            tensor = self._weights[name]
            assert isinstance(tensor, DenseTensor)
            require_finite([tensor], threads)
            if name.partition(".")[2] in tables:
                self._tables[name] = tensor

    def of_tower(self) -> Iterator[LoraAdapter]:
        """The adapter of each task."""
        for t in range(len(self._tasks.prompts)):
            yield LoraAdapter(tuple(self._updates(t)))

    def add(self, table: str, rows: Rows, numbers: NDArray[np.integer], tasks: NDArray[np.integer]) -> None:
        """Add to rows of a table, which have these `numbers`, what their `tasks` add; -1: nothing.

        Each row is summed by itself, so that its bits do not depend on the others.
        """
        for t in np.unique(tasks[tasks >= 0]).tolist():
            of_task = np.flatnonzero(tasks == t)
            a = self._tables[f"{t}.{table}.lora_a"]
            factors = to_float32(replace(a, data=a.data[numbers[of_task]])) * self._scale
            for factor, row in zip(factors.T, to_float32(self._tables[f"{t}.{table}.lora_b"]), strict=True):
                rows[of_task] += factor[:, None] * row

    def _updates(self, t: int) -> Iterator[LowRankUpdate]:
        for name, parts in self._tasks.matrices.items():
            a, b = (to_float32(self._weights[f"{t}.{name}.lora_{kind}"]) for kind in "ab")
            first = 0
            for part in parts:
                end = first + self._outputs[f"{part}.weight"]
                yield LowRankUpdate(part, a, np.ascontiguousarray(b[first:end]), float(self._scale))
                first = end


def _of_matrices(tasks: TasksSpec, tower: TowerSpec) -> Shapes:
    sizes = tower_shapes(tower)
    shapes: Shapes = {}
    for name, parts in tasks.matrices.items():
        outputs, inputs = sum(sizes[f"{part}.weight"][0] for part in parts), sizes[f"{parts[0]}.weight"][1]
        shapes |= {f"{name}.lora_a": (tasks.rank, inputs), f"{name}.lora_b": (outputs, tasks.rank)}
    return shapes


def _of_tables(tasks: TasksSpec, model: EncoderModel) -> Shapes:
    shapes: Shapes = {}
    for name, count in model.embedding.tables.items():
        shapes |= {f"{name}.lora_a": (count, tasks.rank), f"{name}.lora_b": (tasks.rank, model.tower.hidden_size)}
    return shapes
