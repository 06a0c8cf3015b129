"""A request's constraints on the tokens sampled for it, and their state in one sequence."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..outputs import FinishReason
from ..sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer
from .filters import ALL, AllowedTokens, BadWords, Mask, TokenFilter, mask_of, mask_words
from .grammar import Grammar
from .source import limit_in, matcher_error
from .thinking_budget import ThinkingBudget, ThinkingLimit

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class Preface:
    """What a model may write before the grammar applies: its reasoning, up to one of the tags `closings`.

    The answer begins with reasoning if it `is_open`, or if its first token is `opening_id`. (Only the prompt can open a
    tag that is not a single token.) The whole token that ends the tag belongs to the reasoning. The answer cannot end
    before that, because it would lack what the grammar demands.
    """

    closings: tuple[str, ...]
    is_open: bool = False
    opening_id: int | None = None


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """A request's constraints. A token is allowed if all of them allow it.

    `bad_words` are runs of tokens (see `bad_word_tokens`). The grammar applies from the first token on, or after the
    preface, which `thinking` limits.
    """

    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    preface: Preface | None = None
    thinking: ThinkingBudget | None = None


class Failure(NamedTuple):
    """Why a constrained sequence cannot go on: INVALID if its request cannot be satisfied, else ERROR."""

    reason: FinishReason
    message: str


class SequenceConstraint:
    """The constraints of one sequence. Their state depends only on the tokens sampled for the sequence. So preemption
    and recomputation do not change it.

    The grammar decides when an answer is complete. If nothing else may follow, the sequence ends, even with
    `ignore_eos` and before `min_tokens`. If the answer may end or go on, these two parameters apply: they forbid the
    tokens that would end it.
    """

    def __init__(
        self,
        wanted: TokenConstraints,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        """`eos_ids` and `vocab_size` are the model's."""
        self.failure: Failure | None = None
        self.is_terminated = False
        self.seconds_behind = 0.0  # see MaskCosts
        words = mask_words(vocab_size)
        self._filters: list[TokenFilter] = []
        if wanted.allowed_token_ids is not None:
            self._filters.append(AllowedTokens(wanted.allowed_token_ids, words))
        if wanted.bad_words:
            self._filters.append(BadWords(wanted.bad_words, words))
        if wanted.thinking is not None:
            self._filters.append(ThinkingLimit(wanted.thinking, tokenizer, words))
        self._grammar = wanted.grammar
        self._matcher: LLMatcher | None = None
        preface = (wanted.grammar and wanted.preface) or Preface(())
        self._is_in_preface = preface.is_open
        self._opening_id = None if preface.is_open else preface.opening_id
        self._closings = preface.closings
        self._preface_end = ""  # the end of the preface so far, in which the tag may begin
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        self._num_tokens = 0
        self._min_tokens = sampling.min_tokens
        ignored = set(eos_ids) if sampling.ignore_eos else set()
        self._never_ends = ~mask_of(ignored, words) if ignored else None
        self._not_yet = ~mask_of(set(eos_ids) | set(sampling.stop_token_ids), words)
        self._no_eos = ~mask_of(eos_ids, words)
        self._last_word = np.uint32((1 << vocab_size % 32) - 1)  # its bits that stand for tokens

    def fresh(self) -> SequenceConstraint:
        """The same constraint for another sequence. Neither sequence may have sampled anything."""
        other = copy(self)
        other._filters = [token_filter.fresh() for token_filter in self._filters]
        other._detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        return other

    def copied(self) -> SequenceConstraint:
        """A copy as it is now. What that takes in does not change this one."""
        other = copy(self)
        other._filters = [token_filter.copied() for token_filter in self._filters]
        other._detokenizer = self._detokenizer.copied()
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return other

    @property
    def grammar(self) -> Grammar | None:
        """The grammar, even if it does not apply to the next token."""
        return self._grammar

    def matcher(self) -> LLMatcher | None:
        """The grammar's matcher, if the grammar applies to the next token."""
        if self._grammar is None or not self.has_rules:
            return None
        if self._matcher is None:
            self._matcher = self._grammar.new_matcher()
        return self._matcher

    @property
    def has_mask(self) -> bool:
        """Whether any token is forbidden next."""
        is_filtered = any(not token_filter.is_idle for token_filter in self._filters)
        return self._grammar is not None or is_filtered or self._num_tokens < self._min_tokens

    @property
    def has_rules(self) -> bool:
        """Whether the grammar applies to the next token."""
        return self._grammar is not None and not self._is_in_preface

    def next_mask(self) -> Mask | None:
        """What the next token may be; None if that cannot be said."""
        mask = np.full(len(self._not_yet), ALL, np.uint32)
        if (matcher := self.matcher()) is not None:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.restrict(mask)
        return mask if self.failure is None else None

    def restrict(self, mask: Mask) -> None:
        """Clear the bits of forbidden tokens in a mask of those that the grammar allows.

        Notes a failure if no token is left.
        """
        if self._matcher is not None and (message := matcher_error(self._matcher)) is not None:
            self.failure = self.failure or Failure(FinishReason.INVALID, _unfollowed(message))
            self._note_limit()
        if self._opening_id is not None:
            mask[self._opening_id >> 5] |= np.uint32(1 << (self._opening_id & 31))
        for token_filter in self._filters:
            token_filter.restrict(mask)
        is_early = self._num_tokens < self._min_tokens
        is_owed = self._grammar is not None and self._is_in_preface  # what the grammar describes
        no_end = self._not_yet if is_early else self._no_eos if is_owed else self._never_ends
        if no_end is not None and (not self.has_rules or (mask & no_end).any()):
            mask &= no_end
        if not (mask[:-1].any() or mask[-1] & self._last_word):
            fields = [token_filter.field for token_filter in self._filters if not token_filter.is_idle]
            if self.has_rules or is_owed:
                fields.append("the structured output")
            elif no_end is not None:
                fields.append("min_tokens" if is_early else "ignore_eos")
            self.failure = self.failure or Failure(FinishReason.INVALID, _contradiction(fields, self._num_tokens))

    def advance(self, token: int) -> None:
        """Take in a sampled token."""
        if self.failure is not None:
            return
        self._num_tokens += 1
        for token_filter in self._filters:
            token_filter.advance(token)
        if token == self._opening_id:
            self._is_in_preface = True
        elif self._is_in_preface:
            said = self._preface_end + self._detokenizer.push(token)
            self._is_in_preface = not any(tag in said for tag in self._closings)
            self._preface_end = said[-max(map(len, self._closings)) :]
        elif (matcher := self.matcher()) is not None:  # a copy has none yet if its mask had the token before it
            matcher.consume_token(token)
            if (message := matcher_error(matcher)) is not None:
                is_too_large = limit_in(matcher.get_error()) is not None
                self._note_limit()
                reason = FinishReason.INVALID if is_too_large else FinishReason.ERROR
                self.failure = Failure(reason, _unfollowed(message))
            self.is_terminated = matcher.is_stopped()
        self._opening_id = None

    def _note_limit(self) -> None:
        if self._grammar is not None and self._matcher is not None:
            self._grammar.is_spent = self._grammar.is_spent or limit_in(self._matcher.get_error()) is not None


def _unfollowed(message: str) -> str:
    return f"the grammar cannot be followed: {message}"


def _contradiction(fields: list[str], num_tokens: int) -> str:
    rest = f"no token that can come next, after {num_tokens} tokens of the answer"
    if len(fields) == 1:
        return f"{fields[0]} leaves {rest}"
    return f"{', '.join(fields[:-1])} and {fields[-1]} contradict each other: they leave {rest}"
