"""Room on the nodes of a cluster: for replicas by their cores, and for layers of a model by their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from msgspec import Struct

from tidewheel.engine.files.wording import in_bytes
from tidewheel.engine.loading.inspection import opened_headers
from tidewheel.engine.loading.stages.split import BESIDE_WEIGHTS, max_layers
from tidewheel.engine.options import EngineOptions

from .room import room_for


class ModelSize(Struct, frozen=True):
    """A model's weights in memory, `num_bytes` in all, and how many of its layers fit into so much memory."""

    name: str
    kept_as: str
    num_bytes: int
    num_layers: int
    layers_in: Callable[[int], int]


class Takes(Struct, frozen=True):
    """How many replicas, or how many layers of the model, a node has room for; None where that is not known."""

    replicas: int
    layers: int | None


def size_of(options: EngineOptions) -> ModelSize:
    """The size of the model that the options name. Raises ModelError and DeviceError."""
    with opened_headers(options) as model:
        spec, formats, weights = model.spec, model.plan.formats, model.weight_bytes

        def layers_in(room: int) -> int:
            free = room * BESIDE_WEIGHTS // (BESIDE_WEIGHTS + 1)
            return len(spec.layers) if weights <= free else max_layers(spec, formats, free)

        return ModelSize(options.model, model.kept_as, weights, len(spec.layers), layers_in)


def takes(cpus: float, available: int | None, cpus_per_replica: int, size: ModelSize | None) -> Takes:
    """What a node takes that has `cpus` cores for Ray, and `available` bytes of memory, None if that is not known."""
    replicas = room_for(cpus_per_replica, [cpus])
    if size is None or available is None:
        return Takes(replicas, None)
    each = size.num_bytes + size.num_bytes // BESIDE_WEIGHTS
    return Takes(min(replicas, available // max(each, 1)), size.layers_in(available) if replicas else None)


def render_size(size: ModelSize, found: Sequence[Takes]) -> str:
    """The model in a line, and how many of the nodes that take so much a pipeline needs at least."""
    said = (
        f"{size.name}: {size.num_layers} layers, {in_bytes(size.num_bytes)} of weights as {size.kept_as}, beside which "
        "an eighth more is left for KV cache."
    )
    layers = [take.layers for take in found if take.layers is not None]
    if not layers or size.num_layers in layers:
        return said
    together = accumulate(sorted(layers, reverse=True))
    needed = next((count for count, sum_of in enumerate(together, 1) if sum_of >= size.num_layers), None)
    if needed is None:
        return f"{said} These nodes do not have the memory for all layers."
    return f"{said} No node has the memory for all layers: a pipeline needs at least {needed} of these nodes."
