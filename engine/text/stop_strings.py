"""StopStrings: finds the first stop string in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. Text that could still become a stop string is held back.

    The stop string that ends first wins. If several end together, the longest one wins. So the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._stop = [_Search(one) for one in stop]
        self._include = include_in_output
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add text. Returns the text that may be shown now, and the stop string if one was found."""
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
        """The text that is still held back, after the last piece."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Looks for one text with the algorithm of Knuth, Morris and Pratt, which compares each character about once.

    With a plain search, a long stop string such as `aaaa` would cost the square of its length for each token.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # how many characters of `stop` the text ends with
        # For each number of matched characters, the next smaller number that matches too; computed as far as needed.
        self._next = [0, 0]

    def push(self, piece: str) -> int:
        """Add text. Returns where in it `stop` ends, 0 if it does not."""
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
