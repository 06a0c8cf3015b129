"""Whether the disk has room for what is to be downloaded from the hub, before the first of it is."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ..errors import ModelError
from .hub import UnreachableError, is_cached, repository_info, split_name, wanted_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

logger = logging.getLogger(__name__)

_GIB = 2**30


class Download(Struct, frozen=True):
    """A hub id whose files will be downloaded; `is_encoder` None leaves it to the files whether it is one in ONNX.

    `with_mmproj`: a GGUF model comes with what makes it see.
    """

    model: str
    revision: str | None = None
    is_encoder: bool | None = False
    with_mmproj: bool = False


def not_cached(downloads: Sequence[Download], download_dir: str | Path | None = None) -> list[Download]:
    """The downloads without weights in the cache."""
    return [d for d in downloads if not is_cached(d.model, d.revision, download_dir, is_encoder=d.is_encoder)]


def check_room(downloads: Sequence[Download], download_dir: str | Path | None = None) -> int:
    """Raise ModelError if the files that are not in the cache yet take more than its disk has free.

    Returns their bytes, as far as these are known. What is the matter with a repository is raised, too. A hub that
    cannot be asked leaves it to the download to say so.
    """
    if not downloads:
        return 0
    from huggingface_hub import constants

    cache = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    missing: dict[Path, int] = {}
    for download in downloads:
        try:
            missing.update(_missing(download, cache))
        except UnreachableError as error:
            logger.debug("the free disk space cannot be checked before %s is downloaded: %s", download.model, error)
    needed = sum(missing.values())
    _require(", ".join(dict.fromkeys(download.model for download in downloads)), needed, cache)
    return needed


def check_room_for(repository: str, files: Sequence[RepoSibling], download_dir: str | Path | None) -> None:
    """The same for these of a repository's files."""
    from huggingface_hub import constants

    cache = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    _require(repository, sum(size for _, size in _lacking(repository, files, cache)), cache)


def _require(names: str, needed: int, cache: Path) -> None:
    free = _free_bytes(cache)
    if needed > free:
        raise ModelError(
            f"{names}: {needed / _GIB:.2f} GiB are still to be downloaded, and the disk of {cache} has "
            f"{free / _GIB:.2f} GiB free: delete models with tidewheel rm (tidewheel list shows them), or name a "
            "folder on a larger disk with HF_HOME or --download-dir"
        )


def _missing(download: Download, cache: Path) -> Iterator[tuple[Path, int]]:
    """Where the cache will have each file that is still to be downloaded, and the bytes that it lacks."""
    repository, _ = split_name(download.model)
    info = repository_info(repository, download.revision, with_sizes=True)
    files = {file.rfilename: file for file in info.siblings or []}
    wanted = wanted_files(
        download.model,
        download.revision,
        [*files],
        is_encoder=download.is_encoder,
        with_mmproj=download.with_mmproj,
    )
    yield from _lacking(repository, [files[name] for name in wanted], cache)


def _lacking(repository: str, files: Sequence[RepoSibling], cache: Path) -> Iterator[tuple[Path, int]]:
    from huggingface_hub.file_download import repo_folder_name

    blobs = cache / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    for file in files:
        path = blobs / str(file.lfs.sha256 if file.lfs else file.blob_id)
        if not path.exists():
            begun = path.with_name(f"{path.name}.incomplete")
            yield path, max((file.size or 0) - (begun.stat().st_size if begun.exists() else 0), 0)


def _free_bytes(folder: Path) -> int:
    """On the disk of a folder, which may not be there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
