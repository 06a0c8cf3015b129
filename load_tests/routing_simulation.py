"""Where requests go under each routing policy, without servers: how often a prefix is found, and how even the load is.

    .venv/bin/python load_tests/routing_simulation.py --replicas 1000 --conversations 200000
    .venv/bin/python load_tests/routing_simulation.py --replicas 2 --recorded mix.jsonl

Conversations begin all the time and have several turns, of different lengths. Some share a system prompt. A replica
keeps the prefixes that it computed last, in a KV cache of bounded size. A hit is a token of a prompt that was found
there. The load is the number of running requests, recorded whenever another one arrives.

A recorded mix was written by `routing.py`: its requests, in their order, with the tokens of their prompts.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from tidewheel.ray.hash_ring import HashRing, hash_of
from tidewheel.ray.policy import Keys, Loads, PrefixPolicy
from tidewheel.ray.prefixes import body_keys, session_key

SYSTEM_PROMPTS = 200
SYSTEM_TOKENS = 600
TURN_TOKENS = 200  # a question and its answer
BUSY = 0.7  # part of the replicas' capacity: running requests, relative to _SLOTS each
_SLOTS = 8
_CACHED = 400  # prefixes that a replica keeps: some of each conversation
_BLOCK = 16  # tokens of a recorded prompt that are cached together


class Policy(Protocol):
    """Chooses a replica for each request."""

    loads: Loads[int]

    def choose(self, keys: Keys) -> int | None:
        """The replica of a request."""

    def took(self, replica: int, keys: Keys) -> None:
        """A replica has taken it."""


class RoundRobin:
    """Replicas in turn."""

    def __init__(self, replicas: int) -> None:
        self.loads: Loads[int] = Loads()
        self.loads.keep(range(replicas))
        self._replicas, self._next = replicas, 0

    def choose(self, keys: Keys) -> int:
        """The next replica."""
        self._next = (self._next + 1) % self._replicas
        return self._next

    def took(self, replica: int, keys: Keys) -> None:
        """Does nothing: this policy keeps no state."""


class PowerOfTwo(RoundRobin):
    """The better of two random ones."""

    def choose(self, keys: Keys) -> int:
        """Whichever of two has fewer requests."""
        first, second = random.randrange(self._replicas), random.randrange(self._replicas)
        return first if self.loads[first] <= self.loads[second] else second


class SessionHash(RoundRobin):
    """The conversation's place on a hash ring, or the next one with less than `most_load` times the mean."""

    def __init__(self, replicas: int, most_load: float = math.inf) -> None:
        super().__init__(replicas)
        self._ring = HashRing(range(replicas))
        self._most_load = most_load

    def choose(self, keys: Keys) -> int:
        """The session's replica."""
        limit = math.inf if math.isinf(self._most_load) else self.loads.limit(self._most_load)
        found = self._ring.find(keys.session or 0, lambda replica: self.loads[replica] < limit)
        return super().choose(keys) if found is None else found


def prefix(replicas: int) -> PrefixPolicy[int]:
    """Tidewheel's policy, which remembers the same number of prefixes as in a proxy."""
    policy: PrefixPolicy[int] = PrefixPolicy(seed=0)
    policy.set_replicas(range(replicas))
    return policy


@dataclass(frozen=True)
class Turn:
    """One request of a conversation.

    `conversation` identifies it for a proxy that also reads its beginning. `keys` are those of Tidewheel's policy.
    `pieces` are the parts of its prompt that are cached separately: a number that stands for the prompt up to there,
    and the piece's tokens. `kept` are the numbers of these and of the answer's. `tokens` counts the whole prompt.
    """

    conversation: int
    keys: Keys
    pieces: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]
    tokens: int


def made_turns(conversations: int, seed: int) -> Iterator[Turn]:
    """The requests of all conversations in order of arrival. Half of the conversations have one turn."""
    chance = random.Random(seed)
    waiting: list[tuple[float, int, tuple[int, ...]]] = []
    for conversation in range(conversations):
        # The popularity of system prompts falls as 1/rank does.
        system = int(SYSTEM_PROMPTS ** chance.random()) - 1
        first = (hash_of(b"system", system), hash_of(b"question", conversation + SYSTEM_PROMPTS))
        heapq.heappush(waiting, (float(conversation), conversation, first))
        while waiting and waiting[0][0] <= conversation:
            now, which, prompt = heapq.heappop(waiting)
            yield _made_turn(which, prompt)
            if chance.random() < 0.5:
                later = (*prompt, hash_of(b"turn", prompt[-1]))
                # The next question comes after a few hundred others for each replica's share of them.
                heapq.heappush(waiting, (now + chance.expovariate(1 / (0.02 * conversations + 1)), which, later))
    while waiting:
        _, which, prompt = heapq.heappop(waiting)
        yield _made_turn(which, prompt)


def _made_turn(conversation: int, prompt: tuple[int, ...]) -> Turn:
    tokens = (SYSTEM_TOKENS, *(TURN_TOKENS for _ in prompt[1:]))
    name = hash_of(b"session", conversation)
    return Turn(
        name,
        Keys(session=name, prefixes=prompt, is_chat=True),
        tuple(zip(prompt, tokens, strict=True)),
        prompt,
        sum(tokens),
    )


def recorded_turns(file: Path) -> Iterator[Turn]:
    """The requests of a file that `routing.py --record` has written."""
    with file.open() as lines:
        for line in lines:
            request = json.loads(line)
            keys = body_keys(json.dumps(request["body"]).encode())
            session = session_key((name.encode(), value.encode()) for name, value in request["headers"].items())
            if session is not None:
                keys = replace(keys, session=session)
            users = [message["role"] for message in request["body"]["messages"]].index("user")
            ids, tokens = request["token_ids"], request["prompt_tokens"]
            kept = [0]
            for end in range(_BLOCK, len(ids) + 1, _BLOCK):
                kept.append(hash_of(repr(ids[end - _BLOCK : end]).encode(), kept[-1]))
            found = (tokens - 1) // _BLOCK  # one token at least is computed, for its logits
            pieces = tuple((key, _BLOCK) for key in kept[1 : found + 1])
            yield Turn(keys.session or keys.prefixes[users], keys, pieces, tuple(kept[1:]), tokens)


@dataclass
class Outcome:
    """The results of a policy.

    `hits` is the share of prompt tokens that were cached. `max_tokens` is the largest replica's prompt tokens by the
    mean of all, and `peak` the largest load by the mean, on average.
    """

    hits: float
    max_tokens: float
    peak: float
    seconds: float


def simulate(
    policy: Policy,
    requests: Iterable[Turn],
    replicas: int,
    *,
    keys_of: Callable[[Turn], Keys],
    running: float,
    cached: int,
    seed: int,
) -> Outcome:
    """Send requests to replicas that each keep `cached` pieces.

    Each request runs for a random time, so that `running` run at a time on average. `keys_of` is what the policy sees.
    """
    chance = random.Random(seed)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
    ends: list[tuple[int, int]] = []  # the request at whose arrival another one ends, and that one's replica
    found = looks = 0
    step = max(1, min(5000, int(running)))
    peaks, loads, tokens, began = 0.0, [0] * replicas, [0] * replicas, time.perf_counter()
    for number, turn in enumerate(requests):
        while ends and ends[0][0] <= number:
            ended = heapq.heappop(ends)[1]
            loads[ended] -= 1
            policy.loads.add(ended, -1)
        keys = keys_of(turn)
        replica = policy.choose(keys)
        assert replica is not None
        policy.took(replica, keys)
        cache = caches[replica]
        for key, size in turn.pieces:
            if key not in cache:
                break
            found += size
        tokens[replica] += turn.tokens
        for key in reversed(turn.kept):  # so that the end of a prompt is evicted first
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > cached:
            cache.popitem(last=False)
        loads[replica] += 1
        policy.loads.add(replica, 1)
        heapq.heappush(ends, (number + 1 + int(chance.expovariate(1 / running)), replica))
        if number % step == step - 1 and number > 3 * running:
            looks += 1
            peaks += max(loads) / (sum(loads) / replicas)
    total = max(1, sum(tokens))
    return Outcome(found / total, max(tokens) * replicas / total, peaks / max(1, looks), time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Compare routing policies, without servers.")
    parser.add_argument("--replicas", type=int, default=1000, help="how many replicas there are [1000]")
    parser.add_argument("--conversations", type=int, default=200_000, help="how many conversations [200000]")
    parser.add_argument("--recorded", type=Path, help="a file that routing.py --record wrote, to play instead")
    parser.add_argument("--blocks", type=int, default=512, help="with --recorded: blocks of each replica's cache [512]")
    parser.add_argument("--concurrency", type=int, default=8, help="with --recorded: requests at a time [8]")
    parser.add_argument("--seed", type=int, default=0, help="of what is random [0]")
    given = parser.parse_args(arguments)
    count = given.replicas
    policies: list[tuple[str, Callable[[], Policy], Callable[[Turn], Keys]]] = [
        ("round robin", lambda: RoundRobin(count), lambda _: Keys()),
        ("power of two", lambda: PowerOfTwo(count), lambda _: Keys()),
        ("hash", lambda: SessionHash(count), lambda turn: Keys(session=turn.conversation)),
        ("hash, bounded load", lambda: SessionHash(count, 1.5), lambda turn: Keys(session=turn.conversation)),
        ("prefix, no session ids", lambda: prefix(count), lambda turn: replace(turn.keys, session=None)),
        ("prefix, session ids", lambda: prefix(count), lambda turn: turn.keys),
    ]
    recorded = None if given.recorded is None else [*recorded_turns(given.recorded)]
    if recorded is None:
        running, cached = BUSY * _SLOTS * count, _CACHED
        print(f"{count} replicas, {given.conversations} conversations")
    else:
        running, cached = given.concurrency, given.blocks
        print(f"{count} replicas of {cached} blocks, {len(recorded)} recorded requests")
    print(f"{'policy':24}{'cached':>10}{'most tokens / mean':>20}{'largest load / mean':>22}{'seconds':>10}")
    for name, make, keys_of in policies:
        random.seed(given.seed)
        requests = made_turns(given.conversations, given.seed) if recorded is None else recorded
        outcome = simulate(make(), requests, count, keys_of=keys_of, running=running, cached=cached, seed=given.seed)
        figures = f"{outcome.hits:10.1%}{outcome.max_tokens:20.2f}{outcome.peak:22.2f}{outcome.seconds:10.1f}"
        print(f"{name:24}{figures}")


if __name__ == "__main__":
    main()
