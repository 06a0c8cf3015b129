"""Which matrices of a model an adapter can change, by the names that they have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import shown
from ..models.spec import DecoderSpec, DeltaNetSpec, mixers, tensor_shapes
from ..models.tensor_ref import TensorRef
from ..weights.lora import ADAPTABLE, EMBED
from ..weights.taking import rows_of


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix of the model, or some of its outputs, and which rows of a checkpoint's matrix those are.

    Input i of the model's matrix is input `input_order[i]` of the checkpoint's; None: they are the same. Where the
    checkpoint has a stack of matrices, the reference has the index of one.
    """

    name: str  # in Tidewheel's words, without `.weight`
    inputs: int
    outputs: int
    first_output: int
    ref: TensorRef
    input_order: tuple[int, ...] | None = None

    def rows(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """The rows of what belongs to the checkpoint's outputs, `[outputs, ...]`; contiguous."""
        return np.ascontiguousarray(rows_of(array, self.ref))

    def columns(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """An array over the checkpoint's inputs, `[..., inputs]`, in the model's order; itself if both are the same."""
        return array if self.input_order is None else np.ascontiguousarray(array[:, list(self.input_order)])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether there are such rows in an array `[outputs, rank]` of that shape, or in a stack of such."""
        taken = self.ref.shape(shape)
        return taken is not None and taken[0] == self.outputs


def adaptable_modules(
    spec: DecoderSpec, tensors: Mapping[str, TensorRef], *, tiled: bool = False
) -> Mapping[str, tuple[Target, ...]]:
    """From the modules of an adapter's file to what they are in the model, for all that can be changed.

    `tensors` says where the weights of the model are in checkpoints with such names, and where its head is, though it
    be tied. `tiled` says that the file has the value heads of delta nets in the order of `DeltaNetSpec.tiled`.
    """
    found: dict[str, list[Target]] = {}
    partly: set[str] = set()  # modules with a part that cannot be changed
    shapes = tensor_shapes(spec)
    for name, ref in tensors.items():
        if name in ("embed.weight", "head.weight") and ref == TensorRef(ref.name):
            module, (outputs, inputs) = name.removesuffix(".weight"), shapes["embed.weight"]
            if module == EMBED:  # what is added to a token's row has the vocabulary as inputs
                outputs, inputs = inputs, outputs
            found[ref.name.removesuffix(".weight")] = [Target(module, inputs, outputs, 0, ref)]
            continue
        adaptable = ADAPTABLE.fullmatch(name)
        targets = _targets(name, shapes[name], ref) if adaptable else []
        if adaptable is None or not targets:
            partly.update(part.name.removesuffix(".weight") for part in ref.parts())
            continue
        order = _value_order(spec, int(adaptable[1]), tiled) if ".delta_" in name else None
        for target in targets:
            if order is not None:
                target = _with_value_heads(target, order)
            found.setdefault(target.ref.name.removesuffix(".weight"), []).append(target)
    return {module: tuple(targets) for module, targets in found.items() if module not in partly}


def not_adaptable(path: Path, module: str) -> ModelError:
    """The error for an adapter's file that changes something else."""
    return ModelError(
        f"{path}: {shown(module)} cannot be changed by an adapter here; linear layers of attention, MLPs and experts, "
        "routers, the embedding and the head can. Merge the adapter into its model"
    )


def _targets(name: str, shape: tuple[int, ...], ref: TensorRef) -> list[Target]:
    """All of a matrix; none if an adapter of the checkpoint's cannot be brought into its form."""
    parts = list(ref.parts())
    if any(part.transpose_each is not None or part.flat for part in parts):
        return []
    first, targets = 0, []
    for part in parts:
        outputs = shape[0] - first if part is parts[-1] else _count(part)
        if outputs is None:
            return []
        # An adapter's B has a row for each output, in checkpoints with transposed weights too.
        rows = TensorRef(part.name, rows=part.rows, each=part.each, permute=part.permute, index=part.index)
        targets.append(Target(name.removesuffix(".weight"), shape[1], outputs, first, rows))
        first += outputs
    return targets


def _count(ref: TensorRef) -> int | None:
    """How many rows a reference takes; None if that depends on the tensor."""
    if ref.rows is not None:
        return ref.rows[1] - ref.rows[0]
    return None if ref.permute is None else len(ref.permute)


def _value_order(spec: DecoderSpec, layer: int, tiled: bool) -> list[int] | None:
    """For each value head of a layer's delta net, which one of the file it is; None if their order is the same."""
    net = next((mixer for mixer in mixers(spec.layers[layer]) if isinstance(mixer, DeltaNetSpec)), None)
    if net is None or net.tiled == tiled:
        return None
    keys, each = net.num_key_heads, net.num_value_heads // net.num_key_heads
    in_file = (keys, each) if net.tiled else (each, keys)
    order: list[int] = np.arange(net.num_value_heads).reshape(in_file).T.reshape(-1).tolist()
    return order


def _with_value_heads(target: Target, order: list[int]) -> Target:
    """The target with the file's value heads in that order."""
    part = target.name.rpartition("_")[2]
    if part == "out":
        return replace(target, input_order=_expanded(order, target.inputs))
    if part in ("v", "z", "a", "b"):
        return replace(target, ref=replace(target.ref, permute=_expanded(order, target.outputs)))
    return target


def _expanded(order: list[int], size: int) -> tuple[int, ...]:
    each = size // len(order)
    return tuple((np.array(order)[:, None] * each + np.arange(each)).reshape(-1).tolist())
