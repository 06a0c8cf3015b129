"""Which matrices of a model an adapter can change, by the names that they have in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..models.description import ModelDescription
from ..models.spec import tensor_shapes
from ..models.tensor_ref import TensorRef
from ..weights.taking import rows_of

# Products of a layer's inputs that every device computes in one piece; experts and routers are not among them.
_ADAPTABLE = re.compile(
    r"layers\.\d+\.(?:q|k|v|q_gate|o|gate|up|down|latent_(?:q|q_down|q_up|kv_down|o)"
    r"|(?:delta|mamba|conv)_(?:q|k|v|z|a|b|c|x|dt|out))\.weight"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix of the model, or some of its outputs, and which rows of a checkpoint's matrix those are."""

    name: str  # in Tidewheel's words, without `.weight`
    inputs: int
    outputs: int
    first_output: int
    ref: TensorRef

    def rows(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows of what belongs to the checkpoint's outputs, `[outputs, ...]`; contiguous."""
        return np.ascontiguousarray(rows_of(array, self.ref))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether there are such rows in an array `[outputs, rank]` of that shape."""
        taken = self.ref.shape(shape)
        return taken is not None and taken[0] == self.outputs


def adaptable_modules(description: ModelDescription) -> Mapping[str, tuple[Target, ...]]:
    """From the modules of the family's checkpoints to what they are in the model, for all that can be changed."""
    found: dict[str, list[Target]] = {}
    shapes = tensor_shapes(description.spec)
    for name, ref in description.tensors.items():
        if _ADAPTABLE.fullmatch(name):
            for target in _targets(name, shapes[name], ref):
                found.setdefault(target.ref.name.removesuffix(".weight"), []).append(target)
    return {module: tuple(targets) for module, targets in found.items()}


def _targets(name: str, shape: tuple[int, ...], ref: TensorRef) -> Iterator[Target]:
    parts = list(ref.parts())
    if any(part.index is not None or part.transpose_each is not None or part.flat for part in parts):
        return
    first = 0
    for part in parts:
        outputs = shape[0] - first if part is parts[-1] else _count(part)
        if outputs is None:
            return
        # An adapter's B has a row for each output, in checkpoints with transposed weights too.
        rows = TensorRef(part.name, rows=part.rows, each=part.each, permute=part.permute)
        yield Target(name.removesuffix(".weight"), shape[1], outputs, first, rows)
        first += outputs


def _count(ref: TensorRef) -> int | None:
    """How many rows a reference takes; None if that depends on the tensor."""
    if ref.rows is not None:
        return ref.rows[1] - ref.rows[0]
    return None if ref.permute is None else len(ref.permute)
