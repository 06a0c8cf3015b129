"""Which devices have which kinds of mixers. It is known here without importing torch or jax."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import DeviceError
from ..models.spec import (
    AltUpSpec,
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LaurelSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ParallelSpec,
    PerLayerSpec,
    ShortConvSpec,
    mixers,
)
from . import SERVING_DEVICES

GRAPH = ("cuda", "rocm", "xpu", "hpu", "neuron", "graph-cpu")
"""The devices of the graph executor, which have the same mixers."""
EVERYWHERE = ("cpu", *GRAPH, "tpu", "torch")

DEVICES_WITH: dict[str, tuple[str, ...]] = {
    AltUpSpec.kind: EVERYWHERE,
    AttentionSpec.kind: EVERYWHERE,
    DeltaNetSpec.kind: EVERYWHERE,
    Mamba2Spec.kind: EVERYWHERE,
    LatentAttentionSpec.kind: EVERYWHERE,
    LaurelSpec.kind: EVERYWHERE,
    MlpSpec.kind: EVERYWHERE,
    ExpertsSpec.kind: EVERYWHERE,
    ParallelSpec.kind: EVERYWHERE,
    ShortConvSpec.kind: EVERYWHERE,
    PerLayerSpec.kind: EVERYWHERE,
}
"""By kind of mixer, the devices that have it, as `--device` calls them."""

FORMS_WITH: dict[str, tuple[str, ...]] = {
    "attention to another layer's K and V": EVERYWHERE,
    "attention with normalized values": EVERYWHERE,
    "attention with keys as values": EVERYWHERE,
    "scaled gates of MLPs": EVERYWHERE,
    "scaled sums": EVERYWHERE,
    "MLPs with sparse gates": EVERYWHERE,
}
"""By form of a mixer or a residual block that not all devices have, those that do."""


def needs(spec: DecoderSpec) -> dict[str, tuple[str, ...]]:
    """The kinds of mixers and their forms that a model needs, in the order of the layers, with the devices of each."""
    kinds = dict.fromkeys(mixer.kind for layer in spec.layers for mixer in mixers(layer))
    forms = dict.fromkeys(form for layer in spec.layers for form in _forms(layer))
    return {kind: DEVICES_WITH.get(kind, ()) for kind in kinds} | {form: FORMS_WITH[form] for form in forms}


def missing_kinds(device: str, spec: DecoderSpec) -> list[str]:
    """What of `needs` a device lacks."""
    return [name for name, able in needs(spec).items() if device not in able]


def _forms(layer: LayerSpec) -> Iterator[str]:
    """The keys of FORMS_WITH that a layer has."""
    for mixer in mixers(layer):
        if isinstance(mixer, AttentionSpec):
            if mixer.kv_layer is not None:
                yield "attention to another layer's K and V"
            if mixer.v_norm is not None:
                yield "attention with normalized values"
            if mixer.values_from_keys:
                yield "attention with keys as values"
        if isinstance(mixer, MlpSpec) and mixer.gate_scale != 1:
            yield "scaled gates of MLPs"
        if isinstance(mixer, MlpSpec) and mixer.cutoff is not None:
            yield "MLPs with sparse gates"
    if any(residual.sum_scale or residual.sum_factor != 1 for residual in layer):
        yield "scaled sums"


def require_mixers(device: str, spec: DecoderSpec) -> None:
    """Raises DeviceError, naming the devices that can, if the device lacks a kind of mixer that the model needs."""
    if not (missing := missing_kinds(device, spec)):
        return
    able = [name for name in SERVING_DEVICES if not missing_kinds(name, spec)]
    way_out = f"choose --device {' or '.join(able)}" if able else "no device has all of them"
    raise DeviceError(
        f"the {device} device has no {' and no '.join(missing)}, which {spec.family} models need: {way_out}"
    )
