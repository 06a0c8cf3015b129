"""The tower of a GGUF file: its config and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import ModelError
from ....files.wording import shown
from ....models.spec import TowerSpec
from ....models.tensor_ref import TensorRef
from ..reader import GgufFile
from .clip_file import ClipFile
from .projectors import PROJECTORS
from .weights import GgufTowerWeights


class GgufTower:
    """A TowerSource over an mmproj file, or a file that has the tower beside its language model.

    Raises ModelError, naming the file, for one that has no tower, or a projector of an unsupported type.
    """

    def __init__(self, file: GgufFile, *, is_found: bool = True) -> None:
        self._clip = ClipFile(file)
        kind = self._clip.projector_type
        if kind not in PROJECTORS:
            raise ModelError(
                f"{file.path}: projector type {shown(kind)} is not supported; supported are {', '.join(PROJECTORS)}"
            )
        self._projector = PROJECTORS[kind](self._clip)
        self.is_found = is_found
        self.origin = f"{file.path}, whose metadata was read as a config.json: "

    @property
    def num_deepstack(self) -> int:
        """Of how many of its layers something is added in the language model's first layers."""
        return len(self._projector.config["vision_config"].get("deepstack_visual_indexes", ()))

    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tower's config, around that of the language model."""
        # Mistral 3 is the one whose language model is looked at further.
        return {**self._projector.config, "text_config": {"model_type": "mistral", **config}}

    def processor(self) -> Mapping[str, Any]:
        """What the file says of pixels and sizes."""
        return self._projector.processor

    def tower_weights(self, spec: TowerSpec, tensors: Mapping[str, Sequence[TensorRef]]) -> GgufTowerWeights:
        """The file's tensors, which have names of their own, but rows in the order of the checkpoint's `tensors`."""
        return GgufTowerWeights(self._clip, self._projector, spec, tensors)
