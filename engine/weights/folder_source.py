"""A Hugging Face model folder as a source: config.json, safetensors, the tokenizer's files, generation_config.json."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..files.folder import read_config, read_json_if_there
from ..models import ModelDescription
from ..models.generation import GenerationConfig, read_generation_config
from ..models.spec import TowerSpec
from ..models.tensor_ref import TensorRef
from .checkpoint import open_checkpoint, open_weights
from .contents import Contents, formats_in
from .quantized import SETTINGS_FILES, layer_reader
from .tensor import WeightSource
from .tower import TowerWeights

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


class FolderSource:
    """A ModelSource over a folder. One that is only asked for its tokenizer needs no other file.

    `load_format` is as for `open_checkpoint`. It is a TowerSource, too.
    """

    origin, is_found = "", False

    def __init__(self, folder: Path, load_format: str = "auto") -> None:
        self.folder = self.path = folder
        self._load_format = load_format

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The folder's `config.json`, and what a file of its own says of the quantization, as in 2023."""
        config = read_config(self.folder)
        if config.get("quantization_config") is None and config.get("compression_config") is None:
            for name, method in SETTINGS_FILES.items():
                if settings := read_json_if_there(self.folder / name):
                    return {**config, "quantization_config": {"quant_method": method, **settings}}
        return config

    def generation(self, config: Mapping[str, Any] | None = None) -> GenerationConfig:
        """What `generation_config.json` and `config.json` say."""
        return read_generation_config(self.folder, self.config if config is None else config)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder's files."""
        from ..text.tokenizer import Tokenizer  # with its libraries, which are imported while the weights are loaded

        return Tokenizer.load(self.folder)

    def mistral_tokenizer(self) -> Tokenizer:
        """The tokenizer of Mistral's own files."""
        from ..text.mistral import load_mistral

        return load_mistral(self.folder)

    def weights(self, description: ModelDescription, config: Mapping[str, Any] | None = None) -> WeightSource:
        """The folder's checkpoint."""
        reader = layer_reader(self.config if config is None else config)
        return open_weights(self.folder, description, reader, self._load_format)

    def tower(self, mmproj: str | None = None) -> FolderSource:
        """The folder. Raises ModelError if a GGUF file is to have the tower."""
        if mmproj is not None:
            raise ModelError(
                f"--mmproj {mmproj}: {self.folder} has safetensors, whose tower lies among them; leave it out"
            )
        return self

    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same config, which has both."""
        return config

    def processor(self) -> dict[str, Any]:
        """What `processor_config.json` and `preprocessor_config.json` say; the latter counts where both do.

        `video_preprocessor_config.json` is its `video_processor`.
        """
        whole = read_json_if_there(self.folder / "processor_config.json")
        images = whole.pop("image_processor", None)
        videos = read_json_if_there(self.folder / "video_preprocessor_config.json")
        return (
            whole
            | (images if isinstance(images, dict) else {})
            | read_json_if_there(self.folder / "preprocessor_config.json")
            | ({"video_processor": videos} if videos else {})
        )

    def tower_weights(self, spec: TowerSpec, tensors: Mapping[str, Sequence[TensorRef]]) -> TowerWeights:
        """The checkpoint's tensors of a tower."""
        return TowerWeights(open_checkpoint(self.folder, self._load_format), spec, tensors)

    def contents(self) -> Contents:
        """What the checkpoint's files hold. Raises ModelError for files that are missing or corrupt."""
        checkpoint = open_checkpoint(self.folder, self._load_format)
        files = sorted({str(stored.path.relative_to(self.folder)) for stored in checkpoint.values()})
        formats = formats_in((stored.dtype, stored.data.nbytes) for stored in checkpoint.values())
        kind = "pytorch" if files and files[0].endswith(".bin") else "safetensors"
        return Contents(kind, tuple(files), formats)
