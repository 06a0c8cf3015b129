"""Which devices have which kinds of mixers. It is known here without importing torch or jax."""

from __future__ import annotations

from ..errors import DeviceError
from ..models.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    Mamba2Spec,
    MlpSpec,
    ParallelSpec,
    ShortConvSpec,
    mixers,
)
from . import SERVING_DEVICES

EVERYWHERE = ("cpu", "cuda", "hpu", "neuron", "tpu", "torch", "graph-cpu")

_STATEFUL = ("cpu", "torch")

DEVICES_WITH: dict[str, tuple[str, ...]] = {
    AttentionSpec.kind: EVERYWHERE,
    DeltaNetSpec.kind: _STATEFUL,
    Mamba2Spec.kind: _STATEFUL,
    MlpSpec.kind: EVERYWHERE,
    ExpertsSpec.kind: ("cpu", "torch"),
    ParallelSpec.kind: EVERYWHERE,
    ShortConvSpec.kind: _STATEFUL,
}
"""By kind of mixer, the devices that have it, as `--device` calls them."""


def missing_kinds(device: str, spec: DecoderSpec) -> list[str]:
    """The kinds of mixers that a model needs and a device lacks, in the order of the layers."""
    kinds = dict.fromkeys(mixer.kind for layer in spec.layers for mixer in mixers(layer))
    return [kind for kind in kinds if device not in DEVICES_WITH.get(kind, ())]


def require_mixers(device: str, spec: DecoderSpec) -> None:
    """Raises DeviceError, naming the devices that can, if the device lacks a kind of mixer that the model needs."""
    if not (missing := missing_kinds(device, spec)):
        return
    able = [name for name in SERVING_DEVICES if not missing_kinds(name, spec)]
    way_out = f"choose --device {' or '.join(able)}" if able else "no device has all that it needs"
    raise DeviceError(
        f"the {device} device has no {' and no '.join(missing)}, which {spec.family} models need: {way_out}"
    )
