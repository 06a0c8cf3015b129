"""What families with a layer for drafts (MTP) share: where checkpoints have its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..description import MtpDescription
from ..spec import LayerSpec, MtpSpec, NormSpec
from ..tensor_ref import TensorRef
from .names import CheckpointNames


def qwen_mtp(
    names: CheckpointNames, norm: NormSpec, layer: LayerSpec, hidden_size: int, refs: Mapping[str, TensorRef]
) -> MtpDescription:
    """The MTP layer of a Qwen, which lies below `mtp.` with the names that the model's layers have below `model.`."""
    spec = MtpSpec(norm, norm, layer, norm)
    top = {
        "mtp.embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "mtp.hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "mtp.project.weight": "mtp.fc.weight",
        "mtp.final_norm.weight": "mtp.norm.weight",
    }
    below = replace(names, base="mtp.")
    return MtpDescription(spec, mtp_tensors(spec, hidden_size, top, below, 0, refs))


def mtp_tensors(
    spec: MtpSpec,
    hidden_size: int,
    top: Mapping[str, str],
    names: CheckpointNames,
    layer: int,
    refs: Mapping[str, TensorRef],
) -> dict[str, TensorRef]:
    """Where its weights are: those in `top` there, and the others where `names` have them of layer number `layer`."""
    tensors = {}
    for name in spec.shapes(hidden_size):
        name = f"mtp.{name}"
        inner = name.removeprefix("mtp.layer.")
        tensors[name] = TensorRef(top[name]) if name in top else names.of_layer(layer, inner, refs)
    return tensors
