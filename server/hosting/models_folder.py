"""The models in a folder, found without reading their weights.

What is in the folder is not trusted: names may be hostile, files broken, and links may lead elsewhere. A model that
cannot be served is found with the reason, and stops no other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.reading import is_there, read_file, read_part
from tidewheel.engine.files.wording import reason
from tidewheel.engine.model_names import name_of_file
from tidewheel.engine.weights.gguf.choosing import MAGIC, all_parts, models_in, without_own_mmproj

from ..options.hosting import MAX_NAME, wrong_name
from ..options.model_sections import MAX_MODELS
from .ollama_store import BLOBS, MANIFESTS, is_store, named_manifests, read_model

_MAX_FILES = 16 * MAX_MODELS  # of one folder
_MAX_CONFIG_BYTES = 4 << 20  # far more than any model's has
_CACHED = "models--"  # a repository in the hub's cache
_SMALL_FILES = ("config.json", "modules.json", "params.json")
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".bin", ".pt", ".pth")


class FoundModel(Struct, frozen=True, kw_only=True):
    """A model of the folder. `where` is its file or folder, and `error` says why it cannot be served, if it cannot.

    Clients read the error, so it says where files are in the folder of models, and not where that is.

    `given` are options that it needs, by name. `fingerprint` changes when files are replaced. `note` says what of it is
    not used.
    """

    name: str
    where: str
    error: str | None = None
    given: Mapping[str, Any] = {}
    fingerprint: tuple[int, ...] = ()
    note: str | None = None


class _Folder(Struct, frozen=True):
    """A folder of which models are taken, whose names begin with `prefix`; all of it lies in `root`."""

    path: str
    root: str
    prefix: str = ""

    def names(self) -> list[str]:
        """What is in it, without hidden files, in order. Raises OSError, and ModelError if there is too much."""
        names = []
        with os.scandir(self.path) as files:
            for file in files:
                if not file.name.startswith("."):
                    names.append(file.name)
                if len(names) > _MAX_FILES:
                    raise ModelError(f"{self.path} has more than {_MAX_FILES} files: models need a folder of their own")
        return sorted(names)

    def leads_out(self, name: str) -> str | None:
        """Why a link in it is not followed; None for what lies in the root."""
        path = os.path.join(self.path, name)
        if not os.path.islink(path) or _lies_in(path, self.root):
            return None
        return "it is a link that leads out of the folder of models: name the model itself with --model NAME=MODEL"


def models_in_folder(folder: str) -> list[FoundModel]:
    """All models of the folder, in the order of their names. Raises ModelError if it cannot be read.

    A model is a GGUF file, or a folder with a config.json or with GGUF files. A folder of other folders is looked
    through for models of the name FOLDER/NAME, and a repository in a cache of the hub has its hub id as its name. A
    folder that Ollama keeps has its models under the names that it gives them.
    """
    root = os.path.realpath(os.path.expanduser(folder))
    found: dict[str, FoundModel] = {}
    try:
        if {*_SMALL_FILES} & {*_Folder(root, root).names()}:
            raise ModelError(
                f"--models-dir {folder} is a model itself: name the folder that it lies in, or serve it alone"
            )
        for model in _models(_Folder(root, root)):
            found.setdefault(model.name, model)
            if len(found) > MAX_MODELS:
                raise ModelError(f"{folder} has more than {MAX_MODELS} models: name those to serve with --model")
    except (OSError, ValueError) as error:
        raise ModelError(f"--models-dir {folder} cannot be read: {reason(error)}") from error
    return sorted(found.values(), key=lambda model: model.name)


def _models(folder: _Folder) -> Iterator[FoundModel]:
    names = folder.names()
    folders = {name for name in names if os.path.isdir(os.path.join(folder.path, name))}
    if folder.path == folder.root and is_store(names):
        yield from _models_of_ollama(folder)
        folders -= {BLOBS, *MANIFESTS}
    for name in sorted(folders):
        yield from _models_of_subfolder(folder, name)
    files = [name for name in names if name not in folders and name.lower().endswith(".gguf")]
    groups = models_in(files).values()
    # What lies beside one model is its own, however it is named.
    blind = without_own_mmproj(files, [parts[0] for parts in groups]) if len(groups) > 1 else ()
    for parts in groups:
        name = name_of_file(parts[0])
        given = {"language_model_only": True} if parts[0] in blind else {}
        yield _of_gguf(folder, parts, folder.prefix + (parts[0] if name in folders else name), given)


def _models_of_ollama(folder: _Folder) -> Iterator[FoundModel]:
    for name, manifest in named_manifests(folder.path, lambda path: _Folder(path, folder.root).names()):
        try:
            if not _lies_in(str(manifest), folder.root):
                raise ModelError(f"{manifest}: it is a link that leads out of the folder of models")
            model = read_model(folder.path, manifest)
            files = [model.file, *(() if model.projector is None else (model.projector,))]
            for file in files:
                _require_gguf(file)
                if not _lies_in(str(file), folder.root):
                    raise ModelError(f"{file}: it is a link that leads out of the folder of models")
        except ModelError as error:
            yield _found(folder, name, str(manifest), str(error))
        else:
            note = f"what Ollama has as its {' and '.join(model.unused)} is not used" if model.unused else None
            found = _found(folder, name, str(model.file), None, model.given, [*map(str, files)])
            yield structs.replace(found, note=note)


def _models_of_subfolder(folder: _Folder, name: str) -> Iterator[FoundModel]:
    path = os.path.join(folder.path, name)
    if wrong := folder.leads_out(name):
        yield _found(folder, folder.prefix + name, path, wrong)
        return
    own_name = name[len(_CACHED) :].replace("--", "/") if name.startswith(_CACHED) else folder.prefix + name
    try:
        if name.startswith(_CACHED):
            snapshot = _snapshot(path)
            if snapshot is not None and _lies_in(snapshot, folder.root):
                yield from _models_of_one(_Folder(snapshot, folder.root), own_name, is_repository=True)
        elif names := [*_models_of_one(_Folder(path, folder.root), own_name)]:
            yield from names
        elif not folder.prefix:
            yield from _models(_Folder(path, folder.root, f"{name}/"))
    except (OSError, ModelError) as error:
        yield _found(folder, own_name, path, reason(error))


def _models_of_one(folder: _Folder, name: str, *, is_repository: bool = False) -> Iterator[FoundModel]:
    """The models of a folder that is one model, or has GGUF files of one; none if it is neither.

    A repository may have its GGUF files in folders, too.
    """
    names = folder.names()
    if is_repository:
        inner = [each for each in names if os.path.isdir(os.path.join(folder.path, each))]
        names += [f"{each}/{file}" for each in inner for file in _Folder(f"{folder.path}/{each}", folder.root).names()]
    files = [each for each in names if each.lower().endswith(".gguf")]
    if any(each in _SMALL_FILES or each.endswith(".safetensors") for each in names):
        yield _of_folder(folder, name, names)
        return
    groups = models_in(files)
    for tag, parts in groups.items():
        yield _of_gguf(folder, parts, name if len(groups) == 1 else f"{name}:{tag.removesuffix('.gguf')}", {})


def _of_gguf(folder: _Folder, parts: list[str], name: str, given: Mapping[str, Any]) -> FoundModel:
    path = os.path.join(folder.path, parts[0])
    try:
        for part in all_parts(folder.path, parts):
            if wrong := folder.leads_out(part):
                raise ModelError(wrong)
            _require_gguf(Path(folder.path, part))
    except ModelError as error:
        return _found(folder, name, path, str(error))
    return _found(folder, name, path, None, given, parts)


def _require_gguf(file: Path) -> None:
    if read_part(file, len(MAGIC)) != MAGIC:
        raise ModelError(f"{file} is no GGUF file, or a broken one: download it again")


def _of_folder(folder: _Folder, name: str, names: Sequence[str]) -> FoundModel:
    config = Path(folder.path, "config.json")
    try:
        for each in names:
            if wrong := folder.leads_out(each):
                raise ModelError(f"{Path(folder.path, each)}: {wrong}")
        if is_there(config) and not isinstance(json.loads(read_file(config, _MAX_CONFIG_BYTES)), dict):
            raise ModelError(f"{config} is not a JSON object")
        if not {"modules.json", "onnx"} & {*names} and not any(each.endswith(_WEIGHTS) for each in names):
            raise ModelError(f"{folder.path} has no weights: its download may not be finished")
    except ModelError as error:
        return _found(folder, name, folder.path, str(error))
    except (ValueError, RecursionError) as error:
        return _found(folder, name, folder.path, f"{config} is not valid JSON: {reason(error)}")
    return _found(folder, name, folder.path, None, {}, names)


def _found(
    folder: _Folder,
    name: str,
    where: str,
    error: str | None,
    given: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
) -> FoundModel:
    shown = "".join(c if c.isprintable() else "\ufffd" for c in name)[:MAX_NAME]
    if error is None and (wrong := wrong_name(name)):
        error = f"the name of its file {wrong}: rename it, or name it with --model NAME=MODEL"
    if error is not None:
        error = error.replace(folder.root + os.sep, "").replace(folder.root, "the folder of models")
    numbers = _fingerprint([os.path.join(folder.path, file) for file in files])
    return FoundModel(name=shown, where=where, error=error, given=given or {}, fingerprint=numbers)


def _lies_in(path: str, root: str) -> bool:
    return os.path.realpath(path).startswith(root.rstrip(os.sep) + os.sep)


def _fingerprint(files: Sequence[str]) -> tuple[int, ...]:
    numbers: list[int] = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:  # it has just gone
            continue
        numbers += (status.st_ino, status.st_size, status.st_mtime_ns)
    return tuple(numbers)


def _snapshot(repository: str) -> str | None:
    """The newest commit of a repository in the hub's cache that is here; None if there is none."""
    folder = Path(repository, "snapshots")
    try:
        commit = read_file(Path(repository, "refs", "main"), 100).decode().strip()
        snapshots = [path for path in folder.iterdir() if path.is_dir()]
    except (OSError, ModelError, ValueError):
        try:
            snapshots, commit = [path for path in folder.iterdir() if path.is_dir()], ""
        except OSError:
            return None
    return max((str(path) for path in snapshots), key=lambda path: os.path.basename(path) == commit, default=None)
