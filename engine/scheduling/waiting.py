"""WaitingQueue: the sequences that do not run. Clients take turns within a priority."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

from ..sequences.sequence import Sequence, SequenceState
from .fair_share import FairShares

_STALE_ENTRIES = 64  # entries that mean nothing any more, which the queue may keep
_MAX_TOKENS = 65536  # of prompts that are looked up in the cache before a choice, which takes some milliseconds

Turn: TypeAlias = tuple[int, float]  # priority, virtual finish time


class WaitingQueue:
    """Each client's sequences by `Sequence.order`, and the clients by the turns of their first sequences.

    A sequence that has ended meanwhile is dropped when it would be its client's first. Turns are looked at only while
    several clients wait. If very many come at once, the last of them have theirs some steps later.
    """

    def __init__(self, shares: FairShares, num_cached: Callable[[Sequence], int]) -> None:
        """`num_cached` says how many tokens of a sequence need not be computed."""
        self._shares = shares
        self._num_cached = num_cached
        self._num_entries = 0
        self._found = ""  # the client whose sequence was looked at last
        self._lines: dict[str, list[tuple[tuple[int, int, int], Sequence]]] = {}  # heaps, by client
        # When a turn changes, a new entry is added. The old one is dropped when it is met.
        self._heap: list[tuple[Turn, tuple[int, int, int], str]] = []
        self._turns: dict[str, Turn] = {}  # by client, as they are in the heap
        # Clients without a turn. `_changed`: the cache was asked for their first sequence. `_new`: in order of arrival.
        self._changed: dict[str, None] = {}
        self._new: dict[str, None] = {}

    @property
    def num_clients(self) -> int:
        """How many clients wait."""
        return len(self._lines)

    def has(self, client: str) -> bool:
        """Whether a client waits."""
        return client in self._lines

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        if sequence.client not in self._lines:
            self._shares.begin(sequence)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Let a sequence wait on that a step had no use for."""
        line = self._lines.setdefault(sequence.client, [])
        heapq.heappush(line, (sequence.order, sequence))
        self._num_entries += 1
        if line[0][1] is sequence:
            self._forget_turn(sequence.client)

    def peek(self) -> Sequence | None:
        """The one whose turn is the first; it stays."""
        if not self._lines:
            return None
        self._found = self._first_client() if len(self._lines) > 1 else next(iter(self._lines))
        return self._lines[self._found][0][1]

    def pop(self) -> Sequence:
        """Take the one that `peek` has just found."""
        sequence = heapq.heappop(self._lines[self._found])[1]
        self._num_entries -= 1
        self._settle(self._found)
        return sequence

    def turn(self, client: str) -> Turn:
        """The turn of the first sequence of a client that waits."""
        if client not in self._turns:
            self._changed.pop(client, None)
            self._new.pop(client, None)
            order, first = self._lines[client][0]
            turn = (first.priority, self._shares.served(first) + self._num_to_compute(first))
            self._turns[client] = turn
            heapq.heappush(self._heap, (turn, order, client))
            if len(self._heap) > 2 * len(self._turns) + _STALE_ENTRIES:
                self._heap = [entry for entry in self._heap if self._turns.get(entry[2]) is entry[0]]
                heapq.heapify(self._heap)
        return self._turns[client]

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order; from any thread."""
        lines = list(self._lines.values())
        return [sequence for line in lines for _, sequence in line if sequence.state is SequenceState.WAITING]

    def end(self, sequence: Sequence, num_waiting: int) -> None:
        """Note that a sequence has ended, which may change its client's turn. `num_waiting` sequences still wait."""
        if sequence.client in self._lines:
            self._settle(sequence.client)
        if self._num_entries > 2 * num_waiting + _STALE_ENTRIES:
            for client, line in self._lines.items():
                self._lines[client] = [entry for entry in line if entry[1].state is SequenceState.WAITING]
                heapq.heapify(self._lines[client])
            self._num_entries = sum([len(line) for line in self._lines.values()])

    def _first_client(self) -> str:
        """The client whose turn it is, of several."""
        for client in list(self._changed):
            self.turn(client)
        num_tokens = 0
        while self._new and num_tokens < _MAX_TOKENS:
            client = next(iter(self._new))
            num_tokens += self._lines[client][0][1].num_tokens
            self.turn(client)
        while self._turns.get(self._heap[0][2]) is not self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def _settle(self, client: str) -> None:
        """Look at a client anew, whose first sequence or whose counter may have changed."""
        line = self._lines[client]
        while line and line[0][1].state is not SequenceState.WAITING:
            heapq.heappop(line)
            self._num_entries -= 1
        self._forget_turn(client)
        if not line:
            del self._lines[client]

    def _forget_turn(self, client: str) -> None:
        for known in (self._turns, self._changed, self._new):
            known.pop(client, None)
        if line := self._lines[client]:
            first = line[0][1]
            is_known = first.num_cached_tokens is not None or first.num_charged >= 0
            (self._changed if is_known else self._new)[client] = None

    def _num_to_compute(self, sequence: Sequence) -> int:
        """How many tokens of a sequence will count once it is admitted, as far as that is known."""
        if sequence.num_cached_tokens is not None:  # it has been before
            return 0
        if sequence.num_charged < 0:
            sequence.num_charged = sequence.num_tokens - self._num_cached(sequence)
        return sequence.num_charged
