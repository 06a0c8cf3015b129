"""FairShares: how much each client has been served, so that clients take turns."""

from __future__ import annotations

from ..sequences.sequence import Sequence, SequenceState

MAX_SHARING = 32
"""Virtual time divides what is computed among at most this many clients. Otherwise a long prompt would wait for ever
while more clients come with short ones. They do not pass it once this many times its own tokens were computed.
"""


class _Clients:
    """The clients of one priority: what each has been served, and where a new one begins. All counts are tokens."""

    __slots__ = ("most", "now", "num_sequences", "served")

    def __init__(self) -> None:
        self.now = self.most = 0.0
        self.served: dict[str, float] = {}
        self.num_sequences: dict[str, int] = {}


class FairShares:
    """Fair queueing of prompts by clients, for each priority apart.

    Each client has a counter of the tokens that it was served (Sheng et al., "Fairness in Serving Large Language
    Models", 2024). A prompt counts as soon as it is admitted, without its cached tokens. An answer counts when it ends.
    What is computed again after a preemption does not count. A prompt's turn is its virtual finish time: its client's
    counter with the prompt added. The lowest goes first. So prompts end in the order that they would have if each
    client had an equal part of every step, and a short one passes a long one that has begun.

    A new client's counter begins at the virtual time. That keeps up with the counter of the client that is computed. It
    moves on by the tokens computed, divided among the clients that have prompts left. So what a client has not used is
    lost, and new clients pass a long prompt but cannot keep it waiting for ever.

    A client is forgotten with the last of its sequences.
    """

    def __init__(self) -> None:
        self._priorities: dict[int, _Clients] = {}

    def add(self, sequence: Sequence, count: int, *, nobody_waits: bool) -> None:
        """Note a request of `count` sequences. If `nobody_waits`, all clients of its priority are equal again."""
        clients = self._priorities.get(sequence.priority)
        if clients is None:
            clients = self._priorities[sequence.priority] = _Clients()
        if nobody_waits:
            clients.now = clients.most
        clients.served.setdefault(sequence.client, clients.now)
        clients.num_sequences[sequence.client] = clients.num_sequences.get(sequence.client, 0) + count

    def begin(self, sequence: Sequence) -> None:
        """Note that its client has something to compute again: what it did not use before is lost."""
        clients = self._priorities[sequence.priority]
        clients.served[sequence.client] = max(clients.served[sequence.client], clients.now)

    def served(self, sequence: Sequence) -> float:
        """The counter of its client."""
        return self._priorities[sequence.priority].served[sequence.client]

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` of a prompt that is to be computed."""
        sequence.num_charged = num_tokens
        sequence.virtual_finish = self._charge(sequence, num_tokens)

    def compute(self, sequence: Sequence, num_tokens: int, num_clients: int) -> None:
        """Note that a step computes `num_tokens` tokens of a prompt while `num_clients` have prompts left."""
        clients = self._priorities[sequence.priority]
        start = sequence.virtual_finish - (sequence.num_tokens - sequence.num_computed)
        clients.now = max(clients.now + num_tokens / MAX_SHARING, start + num_tokens / num_clients)

    def end(self, sequence: Sequence) -> None:
        """Count the answer of a sequence that ends, and no more of its prompt than was computed."""
        num_tokens = sequence.num_tokens - sequence.prompt_len
        if sequence.state is SequenceState.PREFILLING:
            num_tokens -= min(sequence.num_charged, sequence.num_tokens - sequence.num_computed)
        self._charge(sequence, num_tokens)
        clients = self._priorities[sequence.priority]
        clients.num_sequences[sequence.client] -= 1
        if not clients.num_sequences[sequence.client]:
            del clients.num_sequences[sequence.client], clients.served[sequence.client]
            if not clients.served:
                del self._priorities[sequence.priority]

    def _charge(self, sequence: Sequence, num_tokens: int) -> float:
        clients = self._priorities[sequence.priority]
        clients.served[sequence.client] = served = clients.served[sequence.client] + num_tokens
        clients.most = max(clients.most, served)
        return served
