"""A bar on standard error for what takes long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show a bar, or what to make it with instead of tqdm: it takes `total`, `desc` and `unit`."""


@contextlib.contextmanager
def progress(total: int, what: str, use_tqdm: UseTqdm) -> Iterator[Callable[[int], object]]:
    """A function to be told how many more are finished, from any thread."""
    if not use_tqdm:
        yield lambda count: None
        return
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    with contextlib.closing(make(total=total, desc=what, unit="prompt", dynamic_ncols=True)) as bar:
        yield bar.update
