"""GuessRates: how probable it is that a sequence's next guess is right, by what became of the others."""

from __future__ import annotations

# What is expected of a sequence that has had no guess, how much each guess changes it, and how much of it comes back in
# a step without any, so that the text that follows gets its chance.
_FIRST, _LESSON, _RETURNING = 0.7, 0.2, 0.0005


class GuessRates:
    """A probability for each sequence, by its key. Steps are counted by `next_step`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, int]] = {}  # the last one, and the step in which it was learned
        self._step = 0

    def next_step(self, count: int = 1) -> None:
        """A step more in which the others had no guess, or so many."""
        self._step += count

    def of(self, key: int) -> float:
        """That of a sequence."""
        known = self._known.get(key)
        if known is None:
            return _FIRST
        rate, step = known
        return _FIRST + (rate - _FIRST) * (1.0 - _RETURNING) ** (self._step - step) if rate < _FIRST else rate

    def learn(self, key: int, num_guesses: int, num_right: int) -> None:
        """Note a draft, of which the first `num_right` guesses were right. What is behind a wrong one says nothing."""
        rate = self.of(key)
        for right in (1.0,) * num_right + (0.0,) * (num_right < num_guesses):
            rate += _LESSON * (right - rate)
        self._known[key] = rate, self._step

    def ended(self, key: int) -> None:
        """Forget a sequence."""
        self._known.pop(key, None)
