"""What families with a layer for drafts (MTP) share: where checkpoints have its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config import ConfigReader
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


def later_layer_mtp(
    config: ConfigReader, names: CheckpointNames, norm: NormSpec, layer: LayerSpec, refs: Mapping[str, TensorRef]
) -> MtpDescription | None:
    """The MTP layer that lies behind the model's layers as one more of them; None if the config has none.

    Checkpoints of DeepSeek V3 and its successors repeat the embedding and the head there, which are the model's. The
    first such layer is taken.
    """
    if not config.raw("num_nextn_predict_layers"):
        return None
    config.integer("num_nextn_predict_layers")
    number, hidden_size = config.num_layers("num_hidden_layers"), config.integer("hidden_size")
    spec = MtpSpec(norm, norm, layer, norm, feeds_normed=False)
    at = f"{names.base}{names.layers}.{number}."
    top = {
        "mtp.embedding_norm.weight": f"{at}enorm.weight",
        "mtp.hidden_norm.weight": f"{at}hnorm.weight",
        "mtp.project.weight": f"{at}eh_proj.weight",
        "mtp.final_norm.weight": f"{at}shared_head.norm.weight",
    }
    return MtpDescription(spec, mtp_tensors(spec, hidden_size, top, names, number, refs))


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
