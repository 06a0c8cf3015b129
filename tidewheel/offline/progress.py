"""How far something is that takes long: a bar in a notebook or on a terminal, else lines in the log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from tidewheel.engine.progress import AnswerProgress

UseTqdm: TypeAlias = bool | Callable[..., Any]
"""Whether to show how far it is, or what to make a bar with instead of tqdm: it takes `total`, `desc` and `unit`."""


@contextlib.contextmanager
def progress(total: int, unit: str, use_tqdm: UseTqdm) -> Iterator[Callable[[int], object]]:
    """A function to be told how many more are finished, from any thread."""
    if not use_tqdm:
        yield lambda count: None
    elif make := use_tqdm if callable(use_tqdm) else _bar_of_notebooks():
        with contextlib.closing(make(total=total, desc=f"{unit.capitalize()}s", unit=unit, dynamic_ncols=True)) as bar:
            yield bar.update
    else:
        with AnswerProgress(unit, total) as answered:
            yield answered.report


def _bar_of_notebooks() -> Callable[..., Any] | None:
    """What draws bars in the notebook that this runs in; None elsewhere."""
    from tqdm.asyncio import tqdm_asyncio
    from tqdm.auto import tqdm

    return None if tqdm is tqdm_asyncio else tqdm
