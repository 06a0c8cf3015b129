"""Filters: rules about the next token that need no grammar. Every sequence has its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..text.tokenizer import Tokenizer

Mask = NDArray[np.uint32]  # [W]: bit t % 32 of word t // 32 is set if token t is allowed

ALL = np.uint32(0xFFFFFFFF)


def mask_words(vocab_size: int) -> int:
    """How many 32-bit words a mask has: a bit for each token, and one for the extra token that grammars need."""
    return vocab_size // 32 + 1


def mask_of(token_ids: Iterable[int], words: int) -> Mask:
    """A mask with the bits of these tokens set, shape [words]."""
    ids = np.fromiter(token_ids, np.int64)
    mask = np.zeros(words, np.uint32)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask


class TokenFilter(Protocol):
    """A rule about the next token. It depends only on the tokens that were sampled.

    `field` is the request's field that it comes from. If it `is_idle`, any token may come next.
    """

    field: str

    @property
    def is_idle(self) -> bool:
        """Whether it leaves the next token alone."""
        ...

    def restrict(self, mask: Mask) -> None:
        """Clear the bits of the tokens that may not come next."""
        ...

    def advance(self, token: int) -> None:
        """Take in a sampled token."""
        ...

    def fresh(self) -> TokenFilter:
        """The same rule for a sequence that has not sampled anything."""
        ...

    def copied(self) -> TokenFilter:
        """The same rule, with the tokens that this one has taken in."""
        ...


class AllowedTokens:
    """Allows only these tokens."""

    field = "allowed_token_ids"
    is_idle = False

    def __init__(self, token_ids: Iterable[int], words: int) -> None:
        """`words` is how many a mask has."""
        self._mask = mask_of(token_ids, words)

    def restrict(self, mask: Mask) -> None:
        """See TokenFilter."""
        mask &= self._mask

    def advance(self, token: int) -> None:
        """See TokenFilter."""

    def fresh(self) -> AllowedTokens:
        """See TokenFilter."""
        return self

    def copied(self) -> AllowedTokens:
        """See TokenFilter."""
        return self


class BadWords:
    """Forbids runs of tokens: once all tokens of a run except the last were sampled, the last one is forbidden.

    The prompt does not count.
    """

    field = "bad_words"
    is_idle = False

    def __init__(self, words: Iterable[Sequence[int]], mask_words: int) -> None:
        """`words` are runs of at least one token (see `bad_word_tokens`)."""
        longer = [tuple(word) for word in words if len(word) > 1]
        self._mask = ~mask_of((word[0] for word in words if len(word) == 1), mask_words)
        self._by_previous: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for word in longer:
            self._by_previous.setdefault(word[-2], []).append(word)
        self._tail: deque[int] = deque(maxlen=max(map(len, longer), default=1) - 1)

    def restrict(self, mask: Mask) -> None:
        """See TokenFilter."""
        mask &= self._mask
        if not self._tail:
            return
        tail = tuple(self._tail)
        for word in self._by_previous.get(tail[-1], ()):
            if tail[1 - len(word) :] == word[:-1]:
                mask[word[-1] >> 5] &= ~(np.uint32(1) << np.uint32(word[-1] & 31))

    def advance(self, token: int) -> None:
        """See TokenFilter."""
        self._tail.append(token)

    def fresh(self) -> BadWords:
        """See TokenFilter."""
        other = copy(self)
        other._tail = deque(maxlen=self._tail.maxlen)
        return other

    def copied(self) -> BadWords:
        """See TokenFilter."""
        other = copy(self)
        other._tail = self._tail.copy()
        return other


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The runs of tokens that spell these texts, each both at the start of a text and after a space."""
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            runs[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(run for run in runs if run)
