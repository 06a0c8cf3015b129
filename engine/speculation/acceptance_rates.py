"""AcceptanceRates: how probable it is that a sequence's next draft token is right, learned from earlier ones."""

from __future__ import annotations

# The rate of a sequence that has had no draft token, and how much each draft token changes a rate. A rate returns to
# the first by the third number in each step without any, so that the text that follows gets another chance.
_FIRST, _WEIGHT, _RETURNING = 0.7, 0.2, 0.0005


class AcceptanceRates:
    """A probability for each sequence, by its key. Steps are counted by `next_step`."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, int]] = {}  # the last one, and the step in which it was learned
        self._step = 0

    def next_step(self, count: int = 1) -> None:
        """Count `count` more steps. Sequences for which `learn` is not called had no draft token in them."""
        self._step += count

    def of(self, key: int) -> float:
        """The rate of a sequence."""
        known = self._known.get(key)
        if known is None:
            return _FIRST
        rate, step = known
        return _FIRST + (rate - _FIRST) * (1.0 - _RETURNING) ** (self._step - step) if rate < _FIRST else rate

    def learn(self, key: int, num_draft_tokens: int, num_accepted: int) -> None:
        """Note a draft whose first `num_accepted` draft tokens were accepted.

        Nothing is learned from the tokens behind a wrong one.
        """
        rate = self.of(key)
        for right in (1.0,) * num_accepted + (0.0,) * (num_accepted < num_draft_tokens):
            rate += _WEIGHT * (right - rate)
        self._known[key] = rate, self._step

    def ended(self, key: int) -> None:
        """Forget a sequence."""
        self._known.pop(key, None)
