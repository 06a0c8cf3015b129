"""Which tensors of a model folder are quantized, and in which order all are written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..models.tensor_ref import TensorRef
from ..weights.checkpoint import CheckpointWeights
from ..weights.quantization import is_router
from ..weights.stored import Checkpoint, StoredTensor
from .layouts import GROUP_SIZES, LAYOUTS, FolderMethod
from .module_names import joined_with

_LAYER = re.compile(r"layers\.(\d+)\.")
_READS_WITH = {"k": "q", "v": "q", "up": "gate"}  # matrices of a layer that read what another one does

_Uses = Mapping[str, Sequence[tuple[str, TensorRef]]]
"""For each tensor of a file, the weights of Tidewheel's that are taken of it, and how."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a model's tensors.

    `inputs`: those that are quantized, in order, and for each the weight of Tidewheel's that reads the same inputs and
    whose statistics are asked for. `notes`: why other matrices of layers are not. `kept`: the modules that are not
    quantized. `shards`: all tensors, those of a layer together, and behind them those of none. `group_size` is None if
    a row is one group.
    """

    inputs: Mapping[str, str]
    notes: Mapping[str, str]
    kept: Collection[str] = field(repr=False)
    shards: Sequence[Sequence[str]] = field(repr=False)
    group_size: int | None = None


def choose(checkpoint: Checkpoint, weights: CheckpointWeights, method: FolderMethod, head_name: str) -> Choice:
    """What becomes of the tensors of a `checkpoint`, in which `weights` are found. `head_name` is the head's tensor.

    The matrices of linear layers are quantized, if the method has a form for them, and for those that other servers
    join with them. Embedding, head, routers and what is no part of the language model are not.
    """
    uses, order = _uses(checkpoint, weights), {name: number for number, name in enumerate(weights)}
    layer_of = {name: _layer_of(uses[name]) for name in checkpoint}
    matrices = [name for name in checkpoint if layer_of[name] is not None and len(checkpoint[name].shape) > 1]
    notes = {name: note for name in matrices if (note := _why_kept(name, checkpoint[name], uses, method))}
    others = checkpoint.keys() - matrices | notes.keys()
    notes |= {name: note for name in matrices if name not in notes and (note := _why_kept_too(name, others))}
    last = len(order)
    shards = defaultdict[int, list[str]](list)
    for name in sorted(checkpoint, key=lambda name: (order[uses[name][0][0]] if uses[name] else last, name)):
        layer = layer_of[name]
        shards[last if layer is None else layer].append(name)
    quantized = {*matrices} - notes.keys()
    in_order = [shards[layer] for layer in sorted(shards)]
    inputs = {name: _reads_with(uses[name][0][0], order) for shard in in_order for name in shard if name in quantized}
    kept = {_module(name) for name, stored in checkpoint.items() if _is_module(name, stored) and name not in quantized}
    kept |= {"lm_head", _module(head_name)}  # which are modules also if they are tied, and are in no file then
    group_size = _group_size(checkpoint[name].shape[1] for name in quantized) if LAYOUTS[method].groups else None
    return Choice(inputs, notes, kept, in_order, group_size)


def _uses(checkpoint: Checkpoint, weights: CheckpointWeights) -> _Uses:
    by_place = defaultdict[object, list[tuple[str, TensorRef]]](list)
    for name in weights:
        for stored, ref in weights.parts(name):
            by_place[stored.place].append((name, ref))
    return {name: by_place[stored.place] for name, stored in checkpoint.items()}


def _layer_of(uses: Sequence[tuple[str, TensorRef]]) -> int | None:
    """The first layer that uses a tensor; None if there is none."""
    return min((int(found[1]) for name, _ in uses if (found := _LAYER.match(name))), default=None)


def _why_kept(name: str, stored: StoredTensor, uses: _Uses, method: FolderMethod) -> str | None:
    """Why a tensor of a layer is not quantized; None if it can be."""
    layout, refs = LAYOUTS[method], [ref for _, ref in uses[name]]
    if any(ref.index is not None and ".experts." in use for use, ref in uses[name]):
        return f"a stack of experts, for which {method} has no form"
    if (
        not name.endswith(".weight")
        or len(stored.shape) != 2
        or any(ref.index is not None or ref.transpose or ref.flat for ref in refs)
    ):
        return "not the matrix of a linear layer"
    if any(ref.transpose_each for ref in refs):
        return "a matrix whose heads are transposed when it is loaded"
    if any(is_router(use) for use, _ in uses[name]):
        return "a router, which would choose others"
    outputs, inputs = stored.shape
    if inputs % layout.inputs:
        return f"{inputs} inputs, which are no multiple of {layout.inputs}"
    if outputs % layout.outputs:
        return f"{outputs} outputs, which are no multiple of {layout.outputs}"
    return None


def _why_kept_too(name: str, others: Collection[str]) -> str | None:
    for other in joined_with(_module(name)):
        if f"{other}.weight" in others:
            return f"other servers join it with {other}, which is not quantized"
    return None


def _reads_with(name: str, names: Collection[str]) -> str:
    """The weight of Tidewheel's that stands for all that read the same inputs as `name` does."""
    module, _, kind = name.removesuffix(".weight").rpartition(".")
    first = f"{module}.{_READS_WITH.get(kind, kind)}.weight"
    return first if first in names else name


def _is_module(name: str, stored: StoredTensor) -> bool:
    """Whether other servers may take it for the matrix of a module that is quantized."""
    return len(stored.shape) > 1 and (name.endswith(".weight") or ".experts." in name)


def _module(name: str) -> str:
    """The module of a weight. A stack of experts is one, whatever it has."""
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]


def _group_size(inputs: Iterable[int]) -> int | None:
    """The preferred size of groups of all that has so many inputs."""
    counts = {*inputs}
    return next((size for size in GROUP_SIZES if all(count % size == 0 for count in counts)), None)
