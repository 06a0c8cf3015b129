"""StopStrings: finds the first stop string in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. What could still become a stop string is held back.

    The stop string that ends first wins, and of those that end together the longest; so the outcome does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = stop
        self._include = include_in_output
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add text. Returns what may be shown now, and the stop string if one has been found."""
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, stop = found
            self._held = ""
            return text[: end if self._include else start], stop
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
