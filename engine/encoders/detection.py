"""Tells encoders from models that generate, by their names in config.json and GGUF, before any weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import ModelError
from ..files.folder import read_json_if_there
from ..files.reading import is_there
from ..weights.gguf.choosing import find_gguf, is_gguf
from ..weights.hub import download, gguf_metadata, local_model, repository_files, split_name
from .families import FAMILIES

GRAPHS = ("onnx/model.onnx", "model.onnx")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_CLASSIFIES = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
_GGUF_ENCODERS = frozenset(
    "bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 modern-bert neo-bert nomic-bert nomic-bert-moe".split()
)
_SMALL_FILES = ["config.json", "modules.json"]


def is_pooling_model(model: str, revision: str | None = None, download_dir: str | Path | None = None) -> bool:
    """Whether a folder, a GGUF file or a hub id is for embeddings, classes or scores, and generates no text.

    Of a hub id, two small files and the names of the others are looked at, and of a GGUF file its beginning. Raises
    ModelError for a model that is not there.
    """
    local = local_model(model, ".gguf")
    if local is not None:
        return is_encoder(local)
    repository, wanted = split_name(model)
    folder = None if wanted else download(repository, revision, download_dir, _SMALL_FILES, [])

    def has_graph() -> bool:
        return not {*GRAPHS}.isdisjoint(repository_files(repository, revision, download_dir))

    try:
        if folder is not None and _has_small_file(folder):
            return _is_encoder_folder(folder, has_graph)
        found = gguf_metadata(model, revision, download_dir)
        return found is not None and _pools(found)
    except (ModelError, OSError):
        return False


def is_encoder(path: Path) -> bool:
    """The same of a folder or a GGUF file. What cannot be read counts as one that generates."""
    try:
        if path.is_dir():
            if not _has_small_file(path) and (gguf := find_gguf(path)) is not None:
                return _is_encoder_gguf(gguf)
            return _is_encoder_folder(path, lambda: graph_in(path) is not None)
        return is_gguf(path) and _is_encoder_gguf(path)
    except (ModelError, OSError):
        return False


def graph_in(folder: Path) -> Path | None:
    """The ONNX graph of a model folder, if it has one."""
    return next((path for name in GRAPHS if is_there(path := folder / name)), None)


def _has_small_file(folder: Path) -> bool:
    return any(is_there(folder / name) for name in _SMALL_FILES)


def _is_encoder_folder(path: Path, has_graph: Callable[[], bool]) -> bool:
    config = read_json_if_there(path / "config.json")
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    listed = is_there(path / "modules.json")
    if architecture in FAMILIES or architecture.endswith(_CLASSIFIES) or listed or config.get("classifier_from_token"):
        return True
    if any(task in architecture for task in _GENERATES):
        return False
    if architecture:
        from .families.decoder import decoder_of  # which models that generate need not wait for

        if decoder_of(architecture) is not None:
            return True
    return has_graph()


def _is_encoder_gguf(path: Path) -> bool:
    from ..weights.gguf.reader import first_metadata  # which other models need not wait for

    return _pools(first_metadata(path))


def _pools(metadata: Mapping[str, object]) -> bool:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        return False
    pooling = metadata.get(f"{architecture}.pooling_type")
    return architecture in _GGUF_ENCODERS or (isinstance(pooling, int) and pooling != 0)
