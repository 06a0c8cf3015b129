"""AdapterHub: adapters by hub id, downloaded to the hub client's cache."""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import BusyError, ModelError
from ..weights.gguf.choosing import choose_gguf
from ..weights.hub import UnreachableError, cached_folder, download, files_in, repository_info, split_name
from ..weights.hub_room import check_room_for
from .options import HubModule, LoraModule
from .peft_config import CONFIG
from .peft_folder import WEIGHTS, without_weights
from .threads import in_thread

MAX_BYTES = 8 * 2**30
MAX_DOWNLOADS = 4  # at a time
_GIB = 2**30


def is_hub_id(path: str) -> bool:
    """Whether an adapter's path may be a hub id: "owner/name", or "owner/name:Q8_0" for one of several GGUF files."""
    return not path.startswith(("/", ".", "~")) and not os.path.exists(path)


class AdapterHub:
    """The adapters of the hub in the cache of `download_dir`, by default the hub client's own."""

    def __init__(self, download_dir: str | Path | None) -> None:
        self._download_dir = download_dir
        self._running: dict[tuple[str, str | None], asyncio.Future[str]] = {}

    def fetch_before_serving(self, module: LoraModule) -> LoraModule:
        """As `fetch`, but in this thread, and for a server's start: an adapter may have any size."""
        if not is_hub_id(module.path):
            return module
        return self._of_hub(module, self._fetch(module.path, None, max_bytes=None))

    async def fetch(self, module: LoraModule) -> LoraModule:
        """The module with its files on this machine. They are downloaded in another thread if necessary.

        For a hub id it is a HubModule. A path of this machine is left as it is. Raises ModelError for what is no
        adapter or cannot be downloaded, and BusyError while too many are downloaded.
        """
        revision = module.revision if isinstance(module, HubModule) else None
        if revision is None and not is_hub_id(module.path):
            return module
        if revision is not None and await asyncio.to_thread(self._is_there, module):
            return module
        key = module.path, revision
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= MAX_DOWNLOADS:
                raise BusyError(
                    f"{MAX_DOWNLOADS} adapters are being downloaded already: try again when one of them is complete"
                )
            running = self._running[key] = in_thread("adapter-download", lambda: self._fetch(*key, max_bytes=MAX_BYTES))
            running.add_done_callback(lambda _: self._running.pop(key))
        return self._of_hub(module, await asyncio.shield(running))  # others may wait for it too

    def path(self, module: LoraModule) -> Path:
        """The folder or file of a module that was fetched, or of one of this machine. Raises ModelError."""
        if not isinstance(module, HubModule):
            return Path(module.path)
        return self._path(*split_name(module.path), module.revision)

    @staticmethod
    def _of_hub(module: LoraModule, commit: str) -> HubModule:
        return HubModule(module.name, module.path, module.base_model_name, revision=commit)

    def _path(self, repository: str, wanted: str | None, commit: str) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        cache = Path(self._download_dir or constants.HF_HUB_CACHE).expanduser()
        folder = cache / repo_folder_name(repo_id=repository, repo_type="model") / "snapshots" / commit
        names = files_in(folder)
        if not names:
            raise ModelError(f"{repository} at {commit} is not in the cache of {cache}: load the adapter again")
        first = _adapter_files(repository, wanted, names)[0]
        return folder if first == CONFIG else folder / first

    def _is_there(self, module: LoraModule) -> bool:
        try:
            self.path(module)
        except ModelError:
            return False
        return True

    def _fetch(self, name: str, revision: str | None, *, max_bytes: int | None) -> str:
        """Downloads what is missing, and returns the commit."""
        repository, wanted = split_name(name)
        try:
            info = repository_info(repository, revision, with_sizes=True)
        except UnreachableError:
            commit = cached_folder(repository, revision, self._download_dir).name
            self._path(repository, wanted, commit)
            return commit
        files = {file.rfilename: file for file in info.siblings or []}
        names = _adapter_files(repository, wanted, [*files])
        size = sum(files[one].size or 0 for one in names)
        if max_bytes is not None and size > max_bytes:
            raise ModelError(
                f"{repository}: the adapter has {size / _GIB:.2f} GiB, and at most {max_bytes // _GIB} GiB are "
                f"downloaded while a server runs: get it with hf download {repository}, and give its folder"
            )
        check_room_for(repository, [files[one] for one in names], self._download_dir)
        folder = download(repository, revision, self._download_dir, [glob.escape(one) for one in names], [])
        return folder.name


def _adapter_files(repository: str, wanted: str | None, names: Sequence[str]) -> list[str]:
    """The files of a repository that are its adapter. Raises ModelError if there is none."""
    if wanted is None and CONFIG in names:
        if WEIGHTS in names:
            return [CONFIG, WEIGHTS]
        raise without_weights(repository, names.__contains__)
    if any(name.lower().endswith(".gguf") for name in names):
        return choose_gguf(repository, names, wanted)[:1]
    raise ModelError(f"{repository} has no adapter: neither {CONFIG} nor a GGUF file")
