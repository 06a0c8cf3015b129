"""SharedCores: the machine's cores, on which all models of one process compute in turns, and what else they share."""

from __future__ import annotations

import threading

from ..cache.tiers.folder import HeldFolders
from ..devices.base import Device
from .kept_tokenizers import KeptTokenizers
from .turns import Turns


class SharedCores:
    """What the models of one process have in common: their turns, the threads that they compute with, the
    folders for their KV blocks, and the tokenizers of those that were loaded last.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self.tokenizers = KeptTokenizers()
        self.kv_folders = HeldFolders()
        self._lock = threading.Lock()
        self._threads: dict[tuple[tuple[int, ...], ...], object] = {}

    def threads_of(self, device: Device) -> object | None:
        """The threads with which a model on this device computes once it is loaded; None: it has no use for any.

        Models on the same cores have the same. They get the priority of the thread that asks for them first.
        """
        groups = device.thread_groups()
        if groups is None:
            return None
        key = tuple(map(tuple, groups))
        with self._lock:
            if key not in self._threads:
                self._threads[key] = device.start_threads(groups)
            return self._threads[key]

    def close(self) -> None:
        """End the threads, once no model is loaded any more."""
        with self._lock:
            self._threads.clear()
