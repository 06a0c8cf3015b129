"""StopStrings: finds the first stop string in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. What could still become a stop string is held back.

    The stop string that ends first wins, and of those that end together the longest; so the outcome does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = [_Search(one) for one in stop]
        self._include = include_in_output
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add text. Returns what may be shown now, and the stop string if one has been found."""
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        held = 0
        for search in self._stop:
            end = search.push(piece)
            if end and (found is None or (end, -len(search.stop)) < found[:2]):
                found = (end, -len(search.stop), search.stop)
            held = max(held, search.matched)
        if found is not None:
            end, length, stop = found
            end += len(self._held)
            self._held = ""
            return text[: end if self._include else end + length], stop
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Looks for one text as Knuth, Morris and Pratt do: each character that comes is compared about once.

    Otherwise a long stop string of the kind `aaaa` would cost its length squared for each token.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text so far ends with
        # For each number of matched characters, the next smaller one that the text ends with too; as far as needed.
        self._next = [0, 0]

    def push(self, piece: str) -> int:
        """Add text; where in it `stop` has its end, 0 if it has none."""
        stop, at, matched = self.stop, 0, self.matched
        while at < len(piece):
            if not matched:
                at = piece.find(stop[0], at) + 1
                if not at:
                    break
                matched = 1
            elif piece[at] == stop[matched]:
                matched += 1
                at += 1
                if matched == len(self._next):
                    self._extend()
            else:
                matched = self._next[matched]
                continue
            if matched == len(stop):
                return at
        self.matched = matched
        return 0

    def _extend(self) -> None:
        stop, known = self.stop, self._next
        last = stop[len(known) - 1]
        shorter = known[-1]
        while shorter and stop[shorter] != last:
            shorter = known[shorter]
        known.append(shorter + (stop[shorter] == last))
