"""Which replica takes a request: where the prefix of its conversation lies, as long as that one is not overloaded.

Nothing here knows of Ray. `load_tests/routing_simulation.py` runs these policies too.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence, Set
from typing import Final, Generic, TypeVar

from msgspec import Struct

from .hash_ring import HashRing, hash_of

Replica = TypeVar("Replica", bound=Hashable)

MAX_OWN: Final = 8
"""Requests that a replica may have before a chat leaves it: a batch of so few costs less than its prompt anew."""

DEFAULT_MODEL: Final = hash_of(b"default model")
"""The number of the model that answers requests which name none."""

_REMEMBERED = 200_000  # prefixes
_MAX_HOLDERS = 16  # of one prefix that are remembered
_MIN_LIMIT = 2  # requests that a replica may have, however idle the others are


class Keys(Struct, frozen=True):
    """A request's keys, as 64-bit numbers; all may be missing.

    `session` names its conversation. `model` is the number of the model or adapter, and `prefixes` are the numbers of
    the prompt's beginnings, longest last. `is_chat` says that these are messages: a next turn begins with all of them.
    """

    session: int | None = None
    model: int | None = None
    prefixes: Sequence[int] = ()
    is_chat: bool = False


class Loads(Generic[Replica]):
    """The requests of each replica, as far as is known, and of all of them."""

    def __init__(self) -> None:
        self._loads: dict[Replica, int] = {}
        self._total = 0

    def __getitem__(self, replica: Replica) -> int:
        return self._loads.get(replica, 0)

    def set(self, replica: Replica, load: int) -> None:
        """Take note of a replica's number of requests."""
        self._total += load - self._loads.get(replica, 0)
        self._loads[replica] = load

    def add(self, replica: Replica, change: int) -> None:
        """One more request, or one less. Replicas that are not there any more are left out."""
        if replica in self._loads:
            self.set(replica, max(0, self._loads[replica] + change))

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget all other replicas, and begin with 0 for those that are new."""
        self._loads = {replica: self._loads.get(replica, 0) for replica in replicas}
        self._total = sum(self._loads.values())

    def limit(self, most: float, least: int = _MIN_LIMIT) -> int:
        """The requests that a replica may have, one more included: `most` times the mean."""
        return max(least, math.ceil(most * (self._total + 1) / max(1, len(self._loads))))


class _Published(Generic[Replica]):
    """Numbers that replicas say they hold."""

    def __init__(self) -> None:
        self._of: dict[Replica, frozenset[int]] = {}
        self._holders: dict[int, set[Replica]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._holders

    def holders(self, key: int) -> Collection[Replica]:
        """Who holds it."""
        return self._holders.get(key, ())

    def set(self, replica: Replica, keys: Iterable[int]) -> None:
        """Take a replica's word instead of its last one."""
        before, now = self._of.pop(replica, frozenset()), frozenset(keys)
        for key in before - now:
            self._holders[key].discard(replica)
            if not self._holders[key]:
                del self._holders[key]
        for key in now - before:
            self._holders.setdefault(key, set()).add(replica)
        if now:
            self._of[replica] = now

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget all other replicas."""
        for gone in self._of.keys() - replicas:
            self.set(gone, ())


class PrefixPolicy(Generic[Replica]):
    """Sends a request to the replica that computed its conversation's prefix, with bounded load.

    In this order: a replica that took the session, or the longest known prefix, or that has the adapter; the session's
    place on a hash ring, which is the same for all routers; the better of two random replicas. None gets more than
    `most_load` times the mean, or `min_limit` requests if that is more.

    With `loads_models`, replicas load models on demand. Then only those that have loaded the request's model take part
    in this, as long as one of them has room or fewer than `max_own` requests: a batch of so few costs less than to load
    the model once more. A model that none has loaded goes to its own place on the ring, so that all routers load it at
    the same replica.

    Chats have other bounds, because their turns can be told apart. A next turn goes where its whole prompt lies, if
    that replica has fewer than `max_own` requests. A new chat that shares its beginning with others, such as a system
    prompt, goes to a replica that has it only up to the mean: many will follow. `seed` is for tests.
    """

    def __init__(
        self,
        most_load: float = 1.5,
        max_own: int = MAX_OWN,
        remembered: int = _REMEMBERED,
        seed: int | None = None,
        min_limit: int = _MIN_LIMIT,
        *,
        loads_models: bool = False,
    ) -> None:
        self.loads: Loads[Replica] = Loads()
        self._most_load, self._max_own = most_load, max_own
        self._min_limit = min_limit
        self._remembered = remembered
        self._random = random.Random(seed)
        self._replicas: list[Replica] = []
        self._present: set[Replica] = set()
        self._ring: HashRing[Replica] = HashRing(())
        self._taken: OrderedDict[int, tuple[Replica, ...]] = OrderedDict()  # by this router
        self._whole: set[int] = set()  # the prefixes that were all of a chat
        self._held: _Published[Replica] = _Published()
        self._held_whole: dict[Replica, frozenset[int]] = {}
        self._loaded: _Published[Replica] = _Published()
        self._loads_models = loads_models

    def set_replicas(self, replicas: Collection[Replica]) -> None:
        """The replicas that there are now."""
        if self._present == set(replicas):
            return
        self._replicas, self._present = [*replicas], set(replicas)
        self._ring = HashRing(self._replicas)
        self.loads.keep(self._present)
        self._held.keep(self._present)
        self._loaded.keep(self._present)
        self._held_whole = {one: keys for one, keys in self._held_whole.items() if one in self._present}

    def publish(self, replica: Replica, held: Iterable[int], whole: Iterable[int] = ()) -> None:
        """Take a replica's report of the prefixes and adapters that it holds. It replaces the last report.

        `whole` are the prefixes that were all of a chat.
        """
        self._held.set(replica, held)
        self._held_whole[replica] = frozenset(whole)

    def publish_models(self, replica: Replica, models: Iterable[int]) -> None:
        """Take a replica's report of the models that it has loaded, or loads now. It replaces the last report.

        `DEFAULT_MODEL` among them is the one of requests that name none.
        """
        self._loaded.set(replica, models)

    def choose(self, keys: Keys) -> Replica | None:
        """The replica for a request; None if there are none."""
        if not self._replicas:
            return None
        limit = self.loads.limit(self._most_load, self._min_limit)
        if not self._loads_models:
            return self._choose(keys, limit, self._present)
        model = DEFAULT_MODEL if keys.model is None else keys.model
        own_limit = max(limit, self._max_own)
        loaded = {one for one in self._loaded.holders(model) if self.loads[one] < own_limit}
        if not loaded and (place := self._ring.find(model, lambda one: self.loads[one] < own_limit)) is not None:
            return place
        return self._choose(keys, own_limit, loaded or self._present)

    def _choose(self, keys: Keys, limit: int, among: Set[Replica]) -> Replica:
        """The replica for a request among these, of which there is one at least."""
        replica = None if keys.session is None else self._holder(keys.session, limit, among)
        if replica is None:
            replica = self._prefix_holder(keys, limit, among)
        if replica is None and keys.model is not None:
            replica = self._holder(keys.model, limit, among)
        if replica is None and keys.session is not None:
            replica = self._ring.find(keys.session, lambda one: one in among and self.loads[one] < limit)
        if replica is not None:
            return replica
        candidates = self._replicas if among is self._present else [one for one in self._replicas if one in among]
        best = self._better_of_two(candidates)
        if self.loads[best] < limit:
            return best
        with_room = [replica for replica in candidates if self.loads[replica] < limit]
        return self._better_of_two(with_room or candidates)

    def took(self, replica: Replica, keys: Keys) -> None:
        """Remember that a replica took a request."""
        for key in keys.prefixes if keys.session is None else (keys.session, *keys.prefixes):
            before = self._taken.pop(key, ())
            if replica in before:
                self._taken[key] = before
            elif key == keys.session:
                self._taken[key] = (replica,)
            else:
                self._taken[key] = (*before, replica)[-_MAX_HOLDERS:]
        if keys.is_chat and keys.prefixes:
            self._whole.add(keys.prefixes[-1])
        while len(self._taken) > self._remembered:
            self._whole.discard(self._taken.popitem(last=False)[0])

    def _prefix_holder(self, keys: Keys, limit: int, among: Set[Replica]) -> Replica | None:
        """A replica of these that has room and holds the longest prefix."""
        of_own = of_shared = limit
        if keys.is_chat:
            of_own, of_shared = max(limit, self._max_own), self.loads.limit(1, 1)
        for i, key in enumerate(reversed(keys.prefixes)):
            # The whole of a chat that comes again is no next turn: those who send the same prompt share it.
            is_own = i > 0 and (key in self._whole or self._is_held_whole(key))
            replica = self._holder(key, of_own if is_own else of_shared, among)
            if replica is not None:
                return replica
        return None

    def _is_held_whole(self, key: int) -> bool:
        return any(key in self._held_whole.get(one, ()) for one in self._held.holders(key))

    def _holder(self, key: int, limit: int, among: Set[Replica]) -> Replica | None:
        """A replica of these that has room and holds what `key` stands for: the better of two of them."""
        holders = self._taken.get(key, ())
        if key in self._held:
            holders = tuple({*holders, *self._held.holders(key)})
        fit = [replica for replica in holders if replica in among and self.loads[replica] < limit]
        return self._better_of_two(fit) if fit else None

    def _better_of_two(self, replicas: Sequence[Replica]) -> Replica:
        """Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001)."""
        first, second = self._random.choice(replicas), self._random.choice(replicas)
        return first if self.loads[first] <= self.loads[second] else second
