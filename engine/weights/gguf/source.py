"""A GGUF file, or the files of a split one, as a source."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ModelError
from ...files.reading import is_there
from ...models import ModelDescription, describe
from ...models.generation import GenerationConfig
from ..contents import Contents, formats_in
from .architectures import architecture_of, config_of
from .choosing import find_mmproj
from .fields import Fields
from .file_types import file_type_of
from .generation import generation_of
from .ollama import in_llama_cpp_words
from .reader import MAX_TENSORS, GgufFile, GgufTensor, read_gguf
from .vision.clip_file import PATCHES
from .vision.tower import GgufTower
from .weights import GgufWeights

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SPLITS = 1000
# By general.type or general.architecture.
_NOT_MODELS = {
    "adapter": "an adapter",
    "controlvector": "a control vector, which changes a model",
    "imatrix": "an importance matrix, which quantizers use",
    "mmproj": "a projector, which makes a model see or hear",
    "clip": "a projector, which makes a model see or hear",
    "clip-vision": "a projector, which makes a model see or hear",
}


class GgufSource:
    """A ModelSource over a `.gguf` file; of a split model the first file is given, and the others lie beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def file(self) -> GgufFile:
        """The file with the tensors of all its parts. One of Ollama's has the names of llama.cpp's."""
        return in_llama_cpp_words(_with_splits(read_gguf(self.path)))

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The metadata in the words of Hugging Face's config.json."""
        _require_model(self.file)
        config = config_of(self.file)
        try:
            describe(config)  # so that the error names the file
        except ModelError as error:
            raise ModelError(f"{self.path}, whose metadata was read as a config.json: {error}") from error
        return config

    def generation(self, config: Mapping[str, Any] | None = None) -> GenerationConfig:
        """The tokens that end a text or a turn, and the sampling under `general.sampling`."""
        return generation_of(self.file, config or {})

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and the chat template of the metadata."""
        from .tokenizer import tokenizer_of  # with its libraries, which are imported while the weights are loaded

        return tokenizer_of(self.file)

    def mistral_tokenizer(self) -> Tokenizer:
        """Raises ModelError: the metadata has no such file."""
        raise ModelError(
            f"{self.path} is a GGUF file, which has no tekken.json for --tokenizer-mode mistral: name a folder that "
            "has one with --tokenizer, or leave that option out"
        )

    def weights(self, description: ModelDescription, config: Mapping[str, Any] | None = None) -> GgufWeights:
        """The tensors. Raises ModelError if `config` says how they are quantized, which the file says itself."""
        if config is not None and config.get("quantization_config") is not None:
            raise ModelError(
                "--hf-overrides: a GGUF file contains how its tensors are quantized; leave quantization_config out"
            )
        return GgufWeights(self.file.tensors, architecture_of(self.file), self.config, description)

    def tower(self, mmproj: str | None = None) -> GgufTower | None:
        """What lets the model see: that file, the one beside the model, or the model's own tensors for it.

        Raises ModelError for a file that is broken, not supported, or made for another model.
        """
        path = find_mmproj(self.path) if mmproj is None else Path(mmproj).expanduser()
        if path is None and PATCHES not in self.file.tensors:
            return None
        if path is not None and mmproj is None:
            logger.info("Images are taken with %s", path)
        tower = GgufTower(self.file if path is None else read_gguf(path), is_found=mmproj is None)
        fields = Fields(self.file, Fields(self.file).text("general.architecture") + ".")
        wanted = fields.optional_integer("n_deepstack_layers")
        if wanted is not None and wanted != tower.num_deepstack:
            raise ModelError(
                f"{path or self.path} takes features after {tower.num_deepstack} layers, and {self.path.name} adds "
                f"those of {wanted}: they are of different models"
            )
        return tower

    def contents(self) -> Contents:
        """What the files hold. Raises ModelError for files that are missing or corrupt."""
        tensors = self.file.tensors.values()
        files = sorted({tensor.path.name for tensor in tensors} | {self.path.name})
        formats = formats_in((tensor.kind.name, tensor.data.nbytes) for tensor in tensors)
        return Contents("GGUF", tuple(files), formats, file_type_of(self.file))


def _require_model(file: GgufFile) -> None:
    """Raises ModelError, saying what the file is, if it holds no language model."""
    fields = Fields(file)
    kind, architecture = fields.optional_text("general.type"), fields.optional_text("general.architecture")
    what = _NOT_MODELS.get(kind or "") or _NOT_MODELS.get(architecture or "")
    if what is None and not file.tensors:
        what = "a vocabulary without weights, which --tokenizer takes"
    has_drafts = bool(fields.raw(f"{architecture}.nextn_predict_layers"))
    if what is None and has_drafts and not any(name.startswith("blk.0.") for name in file.tensors):
        what = "the layer of a model that predicts further tokens (MTP) alone"
    if what is not None:
        raise ModelError(f"{file.path} is {what}: give the file of the language model itself")


def _with_splits(first: GgufFile) -> GgufFile:
    """The whole model: metadata of the first file, tensors of all."""
    fields = Fields(first, "split.")
    count = fields.optional_integer("count", 1) or 1
    if count == 1:
        return first
    split = _SPLIT.fullmatch(first.path.name)
    if count > _MAX_SPLITS or split is None or int(split[3]) != count:
        raise fields.error("count", "the number of files in a name like model-00001-of-00003.gguf")
    if fields.optional_integer("no") != 0:
        raise ModelError(
            f"{first.path} is a later part of a model: give its first file, {_sibling(first.path, 1).name}"
        )
    tensors: dict[str, GgufTensor] = dict(first.tensors)
    for number in range(2, count + 1):
        path = _sibling(first.path, number)
        if not is_there(path):
            raise ModelError(f"{path}, a part of the model that {first.path.name} begins, does not exist")
        part = read_gguf(path)
        said = Fields(part, "split.")
        if said.optional_integer("no") != number - 1 or said.optional_integer("count") != count:
            raise ModelError(f"{path} says that it is not part {number} of {count} of its model")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ModelError(f"{path} has tensor {twice[0]}, which an earlier part has too")
        tensors |= part.tensors
        if len(tensors) > MAX_TENSORS:
            raise ModelError(f"{path}: the parts of the model up to here have more than {MAX_TENSORS} tensors")
    total = fields.optional_integer("tensors.count")
    if total is not None and total != len(tensors):
        raise ModelError(f"{first.path}: its parts have {len(tensors)} tensors, but it says that there are {total}")
    return GgufFile(first.path, first.metadata, tensors)


def _sibling(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name[: -len('00001-of-00001.gguf')]}{number:05}{path.name[-len('-of-00001.gguf') :]}")
