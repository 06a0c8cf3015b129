"""The metadata of a file with a vision tower, and the sizes that its tensors have."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import ModelError
from ....models.config import MAX_LAYERS
from ..fields import Fields
from ..reader import GgufFile, GgufTensor

PATCHES = "v.patch_embd.weight"
SECOND_FRAME = "v.patch_embd.weight.1"  # a convolution over two frames is stored as one for each

Words = dict[str, Any]


class ClipFile:
    """A file whose tower's fields begin with `clip.vision.`. Old files have wrong sizes in some of them, so that sizes
    are those of tensors where there is a choice. All methods raise ModelError, naming the file.
    """

    def __init__(self, file: GgufFile) -> None:
        self.path, self.tensors = file.path, file.tensors
        self.fields, self.top = Fields(file, "clip.vision."), Fields(file, "clip.")
        if not self.top.flag("has_vision_encoder", PATCHES in file.tensors):
            raise ModelError(f"{file.path} has no vision tower, which images need")
        self.hidden = self.rows(PATCHES)
        self.patch, self.side = self.fields.integer("patch_size"), self.fields.integer("image_size")
        self.depth = self.fields.integer("block_count")
        if self.depth > MAX_LAYERS:  # before there is anything of each
            raise self.fields.error("block_count", f"at most {MAX_LAYERS}")
        up = self.tensor("v.blk.0.ffn_up.weight").shape
        # The first converters gave the MLP's matrices each other's names.
        self.is_mlp_swapped = len(up) == 2 and up[1] != self.hidden == up[0]
        self.inner = up[-1] if self.is_mlp_swapped else up[0]

    @property
    def projector_type(self) -> str:
        """What connects the tower. The first files, for LLaVA, do not say it."""
        keys = ("vision.projector_type", "projector_type")
        said = next((kind for key in keys if (kind := self.top.optional_text(key))), None)
        return said or ("mlp" if self.top.flag("has_llava_projector", False) else self.top.text(keys[1]))

    def tensor(self, name: str) -> GgufTensor:
        """A tensor that must be there."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name}, which images need")
        return self.tensors[name]

    def rows(self, name: str, axis: int = 0) -> int:
        """How many rows it has, or how much along another axis."""
        tensor = self.tensor(name)
        if axis >= len(tensor.shape):
            raise ModelError(f"{tensor.origin} has shape {tensor.shape}, but images need {axis + 1} axes or more")
        return tensor.shape[axis]

    def activation(self, gelu: str = "gelu") -> str:
        """The activation of the tower's MLPs. `gelu` says which one files of this kind mean by that."""
        if self.top.flag("use_silu", False):
            return "silu"
        return gelu if self.top.flag("use_gelu", False) else "quick_gelu"

    def numbers(self, key: str) -> list[Any] | None:
        """An array of the metadata, of numbers or of bools; None if there is none."""
        value = self.fields.raw(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) > MAX_LAYERS:
            raise self.fields.error(key, f"an array of at most {MAX_LAYERS} numbers")
        listed: list[Any] = value.tolist()
        return listed

    def tower(self, gelu: str = "gelu") -> Words:
        """The fields of a vision_config, by all the names that families have for them."""
        heads = self.fields.integer("attention.head_count")
        eps = self.fields.optional_number("attention.layer_norm_epsilon")
        if eps is not None:  # the shortest number with the same float32 is what config.json had
            eps = float(str(np.float32(eps)))
        return {
            "hidden_size": self.hidden,
            "embed_dim": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.depth,
            "depth": self.depth,
            "num_attention_heads": heads,
            "num_heads": heads,
            "image_size": self.side,
            "patch_size": self.patch,
            "hidden_act": self.activation(gelu),
            "layer_norm_eps": eps,
            "rms_norm_eps": eps,
        }

    def processor(self, **others: Any) -> Words:
        """The fields of a preprocessor_config.json: the colours, and what `others` say."""
        colours = {key: self.numbers(key) for key in ("image_mean", "image_std")}
        return {key: value for key, value in {**colours, **others}.items() if value is not None}
