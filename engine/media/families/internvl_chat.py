"""InternVL 2.5 and 3 (https://arxiv.org/abs/2412.05271) as first published: the same vision by other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...models.config import ConfigReader
from ...models.module_tensors import fused_qkv, in_places, module_tensors
from ...models.spec import tower_shapes
from ...models.tensor_ref import TensorRef
from .internvl import MAX_TILES, InternVision
from .settings import BICUBIC, IMAGENET_MEAN, IMAGENET_STD, part_of, side, square
from .towers import conv

_CUTTING = ("dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch")
# What its vision_config means where it leaves out a field.
_TOWER = {
    "image_size": 224,
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "num_hidden_layers": 48,
    "norm_type": "rms_norm",
}


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> InternChatVision:
    """The vision of InternVL in the format of its own code."""
    return InternChatVision(architecture, config, processor)


class InternChatVision(InternVision):
    """Its chat template writes `<image>` for an image, which is no token of its tokenizer."""

    placeholder = "<image>"
    request_fields = frozenset({"min_dynamic_patch", "max_dynamic_patch"})

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, *_as_in_transformers(config, processor))
        embeddings = "vision_model.embeddings"
        names: dict[str, str | TensorRef] = {
            **conv(f"{embeddings}.patch_embedding"),
            **fused_qkv("attn.qkv", self.spec.hidden_size),
            "q_norm": "attn.q_norm",
            "k_norm": "attn.k_norm",
            "up": "mlp.fc1",
            "attention_norm": "norm1",
            "mlp_norm": "norm2",
            "class": TensorRef(f"{embeddings}.class_embedding", index=0),
            "positions": TensorRef(f"{embeddings}.position_embedding", index=0),
            "merge.norm": "mlp1.0",
            "merge": "mlp1.1",
            "connector": "mlp1.3",
        }
        for kind in ("weight", "bias"):
            names[f"o.{kind}"] = TensorRef(f"attn.proj.{kind}", scaled_by="ls1")
            names[f"down.{kind}"] = TensorRef(f"mlp.fc2.{kind}", scaled_by="ls2")
        self.tensors = in_places(module_tensors(tower_shapes(self.spec), names, "vision_model.encoder.layers."), ("",))


def _as_in_transformers(
    config: Mapping[str, Any], processor: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both configs by the names of transformers. How images are cut is in config.json; the other may override it."""
    whole = ConfigReader(config)
    tower = part_of(config, "vision_config").with_defaults(**_TOWER)
    if whole.raw("ps_version") != "v2":
        raise whole.error("ps_version", "v2: the first version gives tiles with rows and columns exchanged")
    for name, only in (("select_layer", -1), ("pad2square", False)):
        whole.refuse(name, only)
    edge = square(tower, "image_size")
    if side(whole, "force_image_size", edge) != edge:
        raise whole.error("force_image_size", f"{edge}, the image_size of vision_config")
    cutting = ConfigReader({**config, **{name: value for name, value in processor.items() if name in _CUTTING}})
    least = most = 1
    if cutting.flag("dynamic_image_size", False):
        least, most = cutting.integer("min_dynamic_patch", 1), cutting.integer("max_dynamic_patch", 6)
        if not least <= most <= MAX_TILES:
            raise cutting.error("max_dynamic_patch", f"from min_dynamic_patch to {MAX_TILES}")
        if most > 1 and not cutting.flag("use_thumbnail", False):
            raise cutting.error("use_thumbnail", "true if images are cut")
    given = {name: value for name, value in config["vision_config"].items() if value is not None}
    renamed = {
        "use_qk_norm": tower.flag("qk_normalization", True),
        "attention_bias": tower.flag("qkv_bias", False),
    }
    settings = {
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
        "resample": BICUBIC,
        **processor,
        "size": {"height": edge, "width": edge},
        "min_patches": least,
        "max_patches": most,
    }
    return {**config, "vision_config": {**_TOWER, **given, **renamed}}, settings
