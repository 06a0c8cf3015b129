"""The models in huggingface_hub's cache: what there is, and how it is deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..files.wording import one_line
from .gguf.choosing import choose_gguf, models_in
from .hub import split_name

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, HFCacheInfo


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that was downloaded. `serve` takes its `name`; for a GGUF model it includes the quantization.

    `bytes` is the size of its files, `modified` when the last of them was written, in seconds since 1970. `revisions`
    are its commits in the cache.
    """

    name: str
    bytes: int
    modified: float
    revisions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheListing:
    """All models, the last that was written first, and what is wrong with the cache, in words."""

    models: tuple[CachedModel, ...]
    warnings: tuple[str, ...]


def cached_models(download_dir: str | Path | None = None) -> CacheListing:
    """The models in the hub's cache, or in that folder. Raises ModelError if it cannot be read."""
    cache = _scan(download_dir)
    if cache is None:
        return CacheListing((), ())
    models = [model for repository in _models_of(cache) for model in _models(repository)]
    models.sort(key=lambda model: (-model.modified, model.name))
    return CacheListing(tuple(models), tuple(one_line(warning) for warning in cache.warnings))


def remove_model(name: str, download_dir: str | Path | None = None) -> int:
    """Delete a model, all revisions of it. Returns the bytes that this frees. Raises ModelError if it is not there."""
    cache, repository = _find(name, download_dir)
    wanted = split_name(name)[1]
    if wanted is not None and (kept := _without(repository, wanted)):
        return _delete_files(repository, kept)
    # A copy of a repository has the same commits.
    alone = replace(cache, repos=frozenset({repository}))
    strategy = alone.delete_revisions(*(revision.commit_hash for revision in repository.revisions))
    freed = int(strategy.expected_freed_size)
    strategy.execute()
    return freed


def size_of(name: str, download_dir: str | Path | None = None) -> int:
    """The bytes that `remove_model` would free. Raises ModelError if the model is not there."""
    _, repository = _find(name, download_dir)
    wanted = split_name(name)[1]
    if wanted is not None and (kept := _without(repository, wanted)):
        return sum(file.size_on_disk for file in _unused(repository, kept))
    return int(repository.size_on_disk)


def _scan(download_dir: str | Path | None) -> HFCacheInfo | None:
    """None if there is no cache yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(None if download_dir is None else Path(download_dir).expanduser())
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"the cache of downloads cannot be read: {one_line(error)}") from error


def _models_of(cache: HFCacheInfo) -> list[CachedRepoInfo]:
    return [repository for repository in cache.repos if repository.repo_type == "model" and repository.revisions]


def _find(name: str, download_dir: str | Path | None) -> tuple[HFCacheInfo, CachedRepoInfo]:
    repository_name, wanted = split_name(name)
    cache = _scan(download_dir)
    for repository in [] if cache is None else _models_of(cache):
        if cache is not None and repository.repo_id == repository_name:
            if wanted is not None:
                choose_gguf(repository_name, _names(repository), wanted)
            return cache, repository
    raise ModelError(f"{repository_name} is not in the cache; tidewheel list shows what is")


def _files(repository: CachedRepoInfo) -> list[CachedFileInfo]:
    return [file for revision in repository.revisions for file in revision.files]


def _name(file: CachedFileInfo, snapshots: Iterable[Path]) -> str:
    """The file's name in the repository, with its folders."""
    return next(
        file.file_path.relative_to(snapshot).as_posix()
        for snapshot in snapshots
        if file.file_path.is_relative_to(snapshot)
    )


def _names(repository: CachedRepoInfo) -> set[str]:
    snapshots = [revision.snapshot_path for revision in repository.revisions]
    return {_name(file, snapshots) for file in _files(repository)}


def _models(repository: CachedRepoInfo) -> list[CachedModel]:
    """One for each GGUF model, and one for all else if that has weights or there is no GGUF model."""
    snapshots = [revision.snapshot_path for revision in repository.revisions]
    commits = tuple(sorted(revision.commit_hash for revision in repository.revisions))
    named = [(_name(file, snapshots), file) for file in _files(repository)]
    gguf = models_in(name for name, _ in named)
    models = [
        _model(f"{repository.repo_id}:{tag}", [file for name, file in named if name in names], commits)
        for tag, names in gguf.items()
    ]
    rest = [(name, file) for name, file in named if not any(name in names for names in gguf.values())]
    if not gguf or any(name.endswith((".safetensors", ".onnx")) for name, _ in rest):
        models.append(_model(repository.repo_id, [file for _, file in rest], commits))
    return models


def _model(name: str, files: list[CachedFileInfo], commits: tuple[str, ...]) -> CachedModel:
    blobs = {file.blob_path: file for file in files}.values()
    modified = max((file.blob_last_modified for file in blobs), default=0.0)
    return CachedModel(name, sum(file.size_on_disk for file in blobs), modified, commits)


def _without(repository: CachedRepoInfo, wanted: str) -> set[str]:
    """The files that stay without a GGUF model; none if no weights would be among them."""
    names = _names(repository)
    kept = names - {*choose_gguf(repository.repo_id, names, wanted)}
    return kept if any(name.lower().endswith((".gguf", ".safetensors", ".onnx")) for name in kept) else set()


def _unused(repository: CachedRepoInfo, kept: set[str]) -> list[CachedFileInfo]:
    """A file for each blob that is used by none of the files that are kept."""
    snapshots = [revision.snapshot_path for revision in repository.revisions]
    used = {file.blob_path for file in _files(repository) if _name(file, snapshots) in kept}
    return list({file.blob_path: file for file in _files(repository) if file.blob_path not in used}.values())


def _delete_files(repository: CachedRepoInfo, kept: set[str]) -> int:
    snapshots = [revision.snapshot_path for revision in repository.revisions]
    unused = _unused(repository, kept)
    try:
        for file in _files(repository):
            if _name(file, snapshots) not in kept:
                file.file_path.unlink(missing_ok=True)
        for file in unused:
            file.blob_path.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{repository.repo_id} cannot be deleted: {error}") from error
    return sum(file.size_on_disk for file in unused)
