"""The hub client's many progress bars as one progress of the server's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

from tqdm import tqdm


def bars_that_report(report: Callable[[int, int], None]) -> type[Any]:
    """A class of bars for `tqdm_class` of the hub's client, which draw nothing.

    `report` is called with the bytes that are here and the total that is known. The client has a bar for what comes
    over the network and one for what is written. The bar that is ahead counts. The smaller total is the files', as the
    other may be a guess.
    """
    of_bytes: list[Any] = []

    class Reporting(tqdm):  # type: ignore[misc]  # which has no types
        monitor_interval = 0  # no thread that draws bars
        _instances: ClassVar[Any] = WeakSet()  # apart from those that are drawn, which would make room for these

        def __init__(self, *arguments: Any, **named: Any) -> None:
            named.pop("name", None)  # of the client's own class
            super().__init__(*arguments, **{**named, "disable": False, "file": _NOWHERE})
            if self.unit == "B":
                of_bytes.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.unit == "B":
                whole = min(filter(None, (bar.total for bar in of_bytes)), default=0)
                report(int(min(max(bar.n for bar in of_bytes), whole)), int(whole))
            return drawn

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

    return Reporting


class _Nowhere:
    """Takes what tqdm writes beside its bars."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


_NOWHERE: Any = _Nowhere()


def bars_are_wanted() -> bool:
    """Whether the hub client's bars have not been turned off."""
    return os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").lower() not in ("1", "true", "yes", "on")
