"""Mapped files of weights that stay in use."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def leave_mapped(view: NDArray[Any]) -> None:
    """Take the pages of a mapped file out of this process. What is used comes back.

    `view` is contiguous. Nothing is done if it is not a view of a mapped file.
    """
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    file = base.obj if isinstance(base, memoryview) else base
    if not isinstance(file, mmap.mmap):
        return
    begin = view.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    if first < begin + view.nbytes:
        file.madvise(mmap.MADV_DONTNEED, first, begin + view.nbytes - first)
