"""What a request demands of the tokens sampled for it, and the state of that in one sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidewheel.engine.constraints.filters import AllowedTokens, BadWords, Mask, TokenFilter, mask_of
from tidewheel.engine.constraints.grammar import Grammar, matcher_error
from tidewheel.engine.request import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """A request's constraints. They hold together: a token is allowed if all of them allow it.

    `bad_words` are runs of tokens (see `bad_word_tokens`). The grammar rules from the first token on, or, with
    `grammar_after`, from behind the first place in the answer where these tokens stand: the end of a reasoning.
    """

    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    grammar_after: tuple[int, ...] = ()


class SequenceConstraint:
    """The constraints of one sequence. Its state follows from the tokens sampled for the sequence and nothing else, so
    preemption and recomputation leave it alone.

    A grammar says when an answer is complete. Where nothing but the end may follow, the sequence ends, also with
    `ignore_eos` and before `min_tokens`: there is nothing more that it might say. Where it may end or go on, both
    are heeded: the tokens that would end it are forbidden.
    """

    def __init__(
        self, wanted: TokenConstraints, sampling: SamplingParams, *, eos_ids: Collection[int], mask_words: int
    ) -> None:
        """`eos_ids` are the model's, `mask_words` is how many 32-bit words a mask has."""
        self.error: str | None = None
        self.is_terminated = False
        self._filters: list[TokenFilter] = []
        if wanted.allowed_token_ids is not None:
            self._filters.append(AllowedTokens(wanted.allowed_token_ids, mask_words))
        if wanted.bad_words:
            self._filters.append(BadWords(wanted.bad_words, mask_words))
        self._grammar = wanted.grammar
        self._matcher: LLMatcher | None = None
        self._awaited = wanted.grammar_after
        self._tail: deque[int] = deque(maxlen=len(wanted.grammar_after))
        self._min_tokens_left = sampling.min_tokens
        ignored = set(eos_ids) if sampling.ignore_eos else set()
        self._never_ends = ~mask_of(ignored, mask_words) if ignored else None
        self._not_yet = ~mask_of(set(eos_ids) | set(sampling.stop_token_ids), mask_words)

    def matcher(self) -> LLMatcher | None:
        """The grammar's matcher, if a grammar rules the next token."""
        if self._matcher is None and self._grammar is not None and not self._awaited:
            self._matcher = self._grammar.new_matcher()
        return self._matcher

    @property
    def has_mask(self) -> bool:
        """Whether any token is forbidden next."""
        return bool(self._filters) or self._min_tokens_left > 0 or (self._grammar is not None and not self._awaited)

    def restrict(self, mask: Mask) -> None:
        """Clear the bits of the tokens that may not come next, given a mask of those that the grammar allows."""
        for token_filter in self._filters:
            token_filter.restrict(mask)
        no_end = self._not_yet if self._min_tokens_left > 0 else self._never_ends
        if no_end is not None and (self._matcher is None or (mask & no_end).any()):
            mask &= no_end

    def check(self) -> None:
        """Note what has gone wrong with the grammar while its mask was made."""
        if self._matcher is not None and (message := matcher_error(self._matcher)) is not None:
            self.error = f"the grammar cannot be followed: {message}"

    def advance(self, token: int) -> None:
        """Take in a sampled token."""
        self._min_tokens_left -= 1
        for token_filter in self._filters:
            token_filter.advance(token)
        if self._awaited:
            self._tail.append(token)
            if tuple(self._tail) == self._awaited:
                self._awaited = ()
        elif self._matcher is not None:
            self._matcher.consume_token(token)
            self.check()
            self.is_terminated = self._matcher.is_stopped()
