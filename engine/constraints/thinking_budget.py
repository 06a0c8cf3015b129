"""A limit on reasoning: once its tokens are used up, only the tag that ends reasoning may come next."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from enum import Enum, auto

from ..text.tokenizer import Tokenizer
from .filters import Mask, mask_of


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of reasoning, and what begins and ends it.

    The answer begins with reasoning if it `is_open`, or with one of `openings`. One of `closings` ends it, or the tag
    of a call: a call must not be broken off. `closing_ids` are the tokens that are written where the model goes on.
    If it `repeats`, there may be reasoning later too, and all of it counts together. Then an opening may begin in
    `begun`, the end of the prompt.
    """

    tokens: int
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    closing_ids: tuple[int, ...]
    is_open: bool = False
    calls: tuple[str, ...] = ()
    repeats: bool = False
    begun: str = ""


class _Place(Enum):
    BEFORE = auto()
    WITHIN = auto()
    BEHIND = auto()


class ThinkingLimit:
    """Keeps a sequence to its budget. See TokenFilter."""

    field = "thinking_token_budget"

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer, mask_words: int) -> None:
        """`mask_words` is how many words a mask has."""
        self._budget = budget
        self._tokenizer = tokenizer
        self._masks = [mask_of((token,), mask_words) for token in budget.closing_ids]
        self._ends = (*budget.closings, *budget.calls)
        self._longest = max(map(len, (*self._ends, *budget.openings)))
        self._begin()

    def _begin(self) -> None:
        budget = self._budget
        self._detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        self._place = _Place.WITHIN if budget.is_open else _Place.BEFORE
        self._said = budget.begun[-self._longest :] if budget.repeats and not budget.is_open else ""  # a tag may begin
        self._left = budget.tokens
        self._num_forced = 0

    @property
    def is_idle(self) -> bool:
        """See TokenFilter."""
        return self._place is not _Place.WITHIN or self._left > 0

    def restrict(self, mask: Mask) -> None:
        """See TokenFilter."""
        if not self.is_idle:
            mask &= self._masks[self._num_forced]

    def advance(self, token: int) -> None:
        """See TokenFilter."""
        if self._place is _Place.BEHIND and not self._budget.repeats:
            return
        text = self._detokenizer.push(token)
        if self._place is not _Place.WITHIN:
            self._look_for_opening(self._said + text)
            return
        if self._left > 0:
            self._left -= 1
            self._said += text
            is_over = any(tag in self._said for tag in self._ends)
            self._said = self._said[-self._longest :]
        else:
            self._num_forced += 1
            is_over = self._num_forced == len(self._masks)
        if is_over:
            self._place, self._said, self._num_forced = _Place.BEHIND, "", 0

    def _look_for_opening(self, said: str) -> None:
        openings = self._budget.openings
        if self._budget.repeats:
            is_open, may_open = any(tag in said for tag in openings), True
        else:
            said = said.lstrip()
            is_open = said.startswith(openings)
            may_open = any(tag.startswith(said) for tag in openings)
        if is_open:
            self._place, self._said = _Place.WITHIN, ""
        elif may_open:
            self._said = said[-self._longest :]
        else:
            self._place = _Place.BEHIND

    def fresh(self) -> ThinkingLimit:
        """See TokenFilter."""
        other = copy(self)
        other._begin()
        return other

    def copied(self) -> ThinkingLimit:
        """See TokenFilter."""
        other = copy(self)
        other._detokenizer = self._detokenizer.copied()
        return other
