"""Where requests go under each routing policy, without servers: how often a prefix is found, and how even the load is.

    .venv/bin/python load_tests/routing_simulation.py --replicas 1000 --conversations 200000

Conversations begin all the time and have several turns, of different lengths. Some share a system prompt. A replica
keeps the prefixes that it computed last, in a KV cache of bounded size. A hit is a token of a prompt that was found
there. The load is the number of running requests, looked at whenever one more comes.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidewheel.ray.hash_ring import HashRing, hash_of
from tidewheel.ray.policy import Keys, Loads, PrefixPolicy

SYSTEM_PROMPTS = 200
SYSTEM_TOKENS = 600
TURN_TOKENS = 200  # a question and its answer
BUSY = 0.7  # of what the replicas could do: requests that run at a time, of _SLOTS each
_SLOTS = 8
_CACHED = 400  # prefixes that a replica keeps: some of each conversation


class Policy(Protocol):
    """What chooses a replica."""

    loads: Loads[int]

    def choose(self, keys: Keys) -> int | None:
        """The replica of a request."""

    def took(self, replica: int, keys: Keys) -> None:
        """A replica has taken it."""


class RoundRobin:
    """One after the other."""

    def __init__(self, replicas: int) -> None:
        self.loads: Loads[int] = Loads()
        self.loads.keep(range(replicas))
        self._replicas, self._next = replicas, 0

    def choose(self, keys: Keys) -> int:
        """The next one."""
        self._next = (self._next + 1) % self._replicas
        return self._next

    def took(self, replica: int, keys: Keys) -> None:
        """Nothing is remembered."""


class PowerOfTwo(RoundRobin):
    """The better of two random ones."""

    def choose(self, keys: Keys) -> int:
        """Whichever of two has fewer requests."""
        first, second = random.randrange(self._replicas), random.randrange(self._replicas)
        return first if self.loads[first] <= self.loads[second] else second


class SessionHash(RoundRobin):
    """The conversation's place on a hash ring, whatever the load is."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._ring = HashRing(range(replicas))

    def choose(self, keys: Keys) -> int:
        """That of the session."""
        found = self._ring.find(keys.session or 0, lambda _: True)
        assert found is not None
        return found


def prefix(replicas: int) -> PrefixPolicy[int]:
    """Tidewheel's policy, which remembers as many prefixes as in a proxy."""
    policy: PrefixPolicy[int] = PrefixPolicy(seed=0)
    policy.set_replicas(range(replicas))
    return policy


@dataclass(frozen=True)
class Turn:
    """One request of a conversation; `before` are the numbers of its prompt's beginnings, longest last."""

    conversation: int
    before: tuple[int, ...]


def turns(conversations: int, seed: int) -> Iterator[Turn]:
    """The requests of all conversations in the order in which they come. Half of the conversations have one turn."""
    chance = random.Random(seed)
    waiting: list[tuple[float, int, Turn]] = []
    for conversation in range(conversations):
        # The popularity of system prompts falls as 1/rank does.
        system = int(SYSTEM_PROMPTS ** chance.random()) - 1
        first = hash_of(b"system", system)
        turn = Turn(conversation, (first, hash_of(b"question", conversation + SYSTEM_PROMPTS)))
        heapq.heappush(waiting, (float(conversation), conversation, turn))
        while waiting and waiting[0][0] <= conversation:
            now, _, turn = heapq.heappop(waiting)
            yield turn
            if chance.random() < 0.5:
                later = Turn(turn.conversation, (*turn.before, hash_of(b"turn", turn.before[-1])))
                # The next question comes when a few hundred others have come for each replica's worth of them.
                heapq.heappush(waiting, (now + chance.expovariate(1 / (0.02 * conversations + 1)), conversation, later))
    while waiting:
        yield heapq.heappop(waiting)[2]


@dataclass
class Outcome:
    """`hits` is the share of prompt tokens that were cached. `peak` is the largest load by the mean, on average."""

    hits: float
    peak: float
    seconds: float


def simulate(policy: Policy, requests: Iterator[Turn], replicas: int, *, sessions: bool, seed: int) -> Outcome:
    """Send requests to replicas, each of which runs for a random time."""
    chance = random.Random(seed)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
    running: list[tuple[int, int]] = []  # the request at whose arrival it ends, and its replica
    mean_length = BUSY * _SLOTS * replicas  # as many run at a time
    tokens = cached = looks = 0
    peaks, loads, began = 0.0, [0] * replicas, time.perf_counter()
    for number, turn in enumerate(requests):
        while running and running[0][0] <= number:
            ended = heapq.heappop(running)[1]
            loads[ended] -= 1
            policy.loads.add(ended, -1)
        session = hash_of(b"session", turn.conversation) if sessions else None
        keys = Keys(session=session, prefixes=turn.before)
        replica = policy.choose(keys)
        assert replica is not None
        policy.took(replica, keys)
        cache = caches[replica]
        found = next((i + 1 for i in range(len(turn.before) - 1, -1, -1) if turn.before[i] in cache), 0)
        cached += _tokens(found)
        tokens += _tokens(len(turn.before))
        for key in turn.before:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > _CACHED:
            cache.popitem(last=False)
        loads[replica] += 1
        policy.loads.add(replica, 1)
        heapq.heappush(running, (number + 1 + int(chance.expovariate(1 / mean_length)), replica))
        if number % 5000 == 4999 and number > 3 * mean_length:
            looks += 1
            peaks += max(loads) / (sum(loads) / replicas)
    return Outcome(cached / max(1, tokens), peaks / max(1, looks), time.perf_counter() - began)


def _tokens(prefixes: int) -> int:
    return 0 if prefixes == 0 else SYSTEM_TOKENS + (prefixes - 1) * TURN_TOKENS


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Compare routing policies, without servers.")
    parser.add_argument("--replicas", type=int, default=1000, help="how many replicas there are [1000]")
    parser.add_argument("--conversations", type=int, default=200_000, help="how many conversations [200000]")
    parser.add_argument("--seed", type=int, default=0, help="of what is random [0]")
    given = parser.parse_args(arguments)
    count = given.replicas
    policies: list[tuple[str, Callable[[], Policy], bool]] = [
        ("round robin", lambda: RoundRobin(count), False),
        ("power of two", lambda: PowerOfTwo(count), False),
        ("session hash", lambda: SessionHash(count), True),
        ("prefix, no session ids", lambda: prefix(count), False),
        ("prefix, session ids", lambda: prefix(count), True),
    ]
    print(f"{count} replicas, {given.conversations} conversations")
    print(f"{'policy':24}{'tokens cached':>15}{'largest load / mean':>22}{'seconds':>10}")
    for name, make, sessions in policies:
        random.seed(given.seed)
        requests = turns(given.conversations, given.seed)
        outcome = simulate(make(), requests, count, sessions=sessions, seed=given.seed)
        print(f"{name:24}{outcome.hits:15.1%}{outcome.peak:22.2f}{outcome.seconds:10.1f}")


if __name__ == "__main__":
    main()
