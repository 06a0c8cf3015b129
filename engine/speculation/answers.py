"""Answers: the last answers that a server gave, and where two given tokens stand side by side in them."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1  # after each answer, so that nothing is found across its ends

_MAX_PLACES = 64  # of two tokens: only the last ones are looked at
_LONGEST = 2**14  # tokens of one answer, which take a millisecond to be chained
_BUCKETS_A_TOKEN = 0.5
_WORD = 2**64 - 1


class Answers:
    """A ring of tokens with an index: each pair of neighbours is chained to the place where that pair stood before.

    Every answer has an owner, a number below 2^64, and only its owner finds it. Chains of two owners meet only by
    chance, which a secret number decides. So the time of a search tells nothing about what others wrote.

    It has `size` tokens, a power of two, of at most `max_answers` answers, and takes 24 bytes a token. New answers
    replace the oldest. They are indexed when somebody searches, or when there are many: together they take less time.
    """

    def __init__(self, max_answers: int, size: int) -> None:
        self._max_answers = max_answers
        self._mask = size - 1
        buckets = max(int(size * _BUCKETS_A_TOKEN), 1)
        self._shift = 64 - max(buckets.bit_length() - 1, 1)
        self._factors = tuple(secrets.randbits(64) | 1 for _ in range(3))
        self.tokens = np.full(size, SEPARATOR, np.int32)  # of position p: tokens[p % size]
        self._before = np.zeros(size, np.int64)  # the last position of the same two tokens before this one
        self._owners = np.zeros(size, np.uint64)
        self._last = np.zeros(2 ** (64 - self._shift), np.int64)  # position of each bucket
        self.clear()

    def __len__(self) -> int:
        """How many answers are kept."""
        self._take_in()
        return len(self._starts)

    def clear(self) -> None:
        """Forget all of them."""
        self._starts: deque[int] = deque()  # the position of each answer's first token
        self._waiting: list[tuple[int, NDArray[np.int32]]] = []  # with their owners
        self._num_waiting = 0  # tokens
        self.tokens[:] = SEPARATOR
        self._last[:] = 0
        self._end = 1  # the position after the last separator; there is one at 0

    def add(self, owner: int, tokens: NDArray[np.int32]) -> None:
        """Keep an answer, or its end: at most a quarter of the ring, and 2^14 tokens. A single token is not kept."""
        most = min(len(self.tokens) // 4, _LONGEST)
        tokens = tokens[-most:].copy()
        if len(tokens) < 2 or not self._max_answers:
            return
        if self._num_waiting + len(tokens) > most:
            self._take_in()
        self._waiting.append((owner, tokens))
        self._num_waiting += len(tokens)

    def _take_in(self) -> None:
        """Index all that wait."""
        if not self._waiting:
            return
        buckets, positions = [], []
        for owner, tokens in self._waiting:
            count = len(tokens)
            self._make_room(count)
            start = self._end
            self._starts.append(start)
            self._end = start + count + 1
            places = np.arange(start, self._end) & self._mask
            self.tokens[places[:-1]] = tokens
            self.tokens[places[-1]] = SEPARATOR
            self._owners[places] = owner
            numbers = tokens.astype(np.uint64)
            buckets.append(self._buckets(owner, numbers[:-1], numbers[1:]))
            positions.append(np.arange(start + 1, start + count))
        self._chain(np.concatenate(buckets), np.concatenate(positions))
        self._waiting, self._num_waiting = [], 0

    def places(self, owner: int, before: int, last: int) -> NDArray[np.int64]:
        """The last positions of the token `last` behind the token `before` in an owner's answers, newest first."""
        self._take_in()
        oldest = self._starts[0] if self._starts else self._end
        found: list[int] = []
        position = int(self._last[self._buckets(owner, before, last)])
        while position >= oldest and len(found) < _MAX_PLACES:
            found.append(position)
            position = self._before.item(position & self._mask)
        places: NDArray[np.int64] = np.array(found, np.int64)
        mine: NDArray[np.int64] = places[self._owners[places & self._mask] == owner]
        return mine

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens at positions that are not before the oldest answer by more than one, nor after the newest."""
        tokens: NDArray[np.int32] = self.tokens[positions & self._mask]
        return tokens

    def _make_room(self, count: int) -> None:
        """Forget the oldest answers until one of `count` tokens fits. The separator before the oldest one stays."""
        starts = self._starts
        while starts and (len(starts) >= self._max_answers or self._end + count + 2 - starts[0] > len(self.tokens)):
            starts.popleft()

    def _buckets(self, owner: int, before: Any, last: Any) -> Any:
        """The buckets of pairs. The tokens are two integers or two arrays of uint64."""
        a, b, c = self._factors
        mixed = before * a + last * b & _WORD
        mixed = (mixed ^ owner * c & _WORD) * 0x9E3779B97F4A7C15 & _WORD
        mixed = (mixed ^ mixed >> 29) * a & _WORD
        return mixed >> self._shift

    def _chain(self, buckets: NDArray[np.uint64], positions: NDArray[np.int64]) -> None:
        order = np.argsort(buckets, kind="stable")
        buckets, positions = buckets[order], positions[order]
        is_new = np.append(True, buckets[1:] != buckets[:-1])
        before = np.append(np.int64(0), positions[:-1])
        before[is_new] = self._last[buckets[is_new]]
        self._before[positions & self._mask] = before
        is_last = np.append(is_new[1:], True)
        self._last[buckets[is_last]] = positions[is_last]
