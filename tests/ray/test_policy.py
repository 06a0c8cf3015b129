"""The routing policy: conversations stay where their prefixes lie, and no replica is overloaded."""

from __future__ import annotations

import math
import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.ray.hash_ring import HashRing, hash_of
from tidewheel.ray.policy import DEFAULT_MODEL, Keys, PrefixPolicy


def policy_of(replicas: int, **kwargs: float) -> PrefixPolicy[int]:
    policy: PrefixPolicy[int] = PrefixPolicy(seed=1, **kwargs)  # type: ignore[arg-type]
    policy.set_replicas(range(replicas))
    return policy


def send(policy: PrefixPolicy[int], keys: Keys) -> int:
    replica = policy.choose(keys)
    assert replica is not None
    policy.took(replica, keys)
    policy.loads.add(replica, 1)
    return replica


def test_without_replicas_there_is_no_choice() -> None:
    assert PrefixPolicy[int]().choose(Keys(session=1)) is None


def test_a_longer_prompt_goes_where_its_longest_prefix_lies() -> None:
    policy = policy_of(50)
    homes = {first: send(policy, Keys(prefixes=(1, first))) for first in range(2, 12)}  # all begin with 1
    policy.loads.keep(())
    policy.loads.keep(range(50))
    for first, home in homes.items():
        assert policy.choose(Keys(prefixes=(1, first, first + 1000))) == home


def test_routers_agree_on_sessions_without_a_word() -> None:
    one, other = policy_of(20), policy_of(20)
    for session in range(200):
        key = hash_of(b"session", session)
        assert one.choose(Keys(session=key)) == other.choose(Keys(session=key))


def test_what_a_replica_publishes_is_found_and_forgotten() -> None:
    policy = policy_of(20)
    policy.publish(7, [100, 101])
    assert policy.choose(Keys(prefixes=(99, 100))) == 7
    assert policy.choose(Keys(model=101, prefixes=(5, 6))) == 7  # an adapter that it has loaded
    policy.publish(7, [101])
    policy.publish(3, [100])
    assert policy.choose(Keys(prefixes=(99, 100))) == 3
    policy.set_replicas([replica for replica in range(20) if replica != 3])
    assert {policy.choose(Keys(prefixes=(99, 100))) for _ in range(100)} > {1, 5}


def test_a_request_goes_where_its_model_is_loaded() -> None:
    policy = policy_of(8, loads_models=True)
    for replica in range(8):
        policy.publish_models(replica, {2: [100], 5: [100, 200]}.get(replica, ()))
    homes = {policy.choose(Keys(session=hash_of(b"s", i), model=100)) for i in range(50)}
    assert homes == {2, 5}
    assert {policy.choose(Keys(prefixes=(i,), model=200, is_chat=True)) for i in range(50)} == {5}
    policy.publish(1, held=[7])  # a prefix that it computed before its model was unloaded
    assert policy.choose(Keys(prefixes=(7,), model=200)) == 5
    policy.publish_models(5, [])
    policy.publish_models(3, [200])
    assert {policy.choose(Keys(prefixes=(7,), model=200)) for _ in range(50)} == {3}


def test_among_those_that_have_a_model_a_conversation_stays() -> None:
    policy = policy_of(8, loads_models=True)
    for replica in range(8):
        policy.publish_models(replica, [100] if replica in (2, 5) else [])
    home = send(policy, Keys(prefixes=(1, 2), model=100, is_chat=True))
    policy.loads.add(home, 3)
    for _ in range(20):
        assert policy.choose(Keys(prefixes=(1, 2, 3, 4), model=100, is_chat=True)) == home


def test_requests_that_name_no_model_go_where_the_default_one_is_loaded() -> None:
    policy = policy_of(8, loads_models=True)
    for replica in range(8):
        policy.publish_models(replica, [DEFAULT_MODEL] if replica == 6 else [])
    assert {policy.choose(Keys(prefixes=(i,))) for i in range(8)} == {6}


def test_routers_agree_on_where_a_model_is_loaded() -> None:
    one, other = policy_of(20, loads_models=True), policy_of(20, loads_models=True)
    places = {}
    for model in range(100):
        key = hash_of(b"model", model)
        places[model] = one.choose(Keys(model=key, prefixes=(1,)))
        assert other.choose(Keys(model=key, session=hash_of(b"session", model))) == places[model]
    assert len({*places.values()}) > 10


def test_a_model_is_loaded_once_more_when_those_that_have_it_are_full() -> None:
    policy = policy_of(4, loads_models=True)
    for replica in range(4):
        policy.publish_models(replica, [100] if replica == 1 else [])
    homes = [send(policy, Keys(model=100, prefixes=(i,))) for i in range(12)]
    assert homes[:8] == [1] * 8
    (other,) = {*homes[8:]}
    assert other != 1


def test_a_full_replica_is_spared() -> None:
    policy = policy_of(4)
    home = send(policy, Keys(session=5))
    policy.loads.set(home, 100)
    assert policy.choose(Keys(session=5)) != home


def test_the_next_turn_of_a_chat_stays_where_a_small_batch_runs() -> None:
    policy = policy_of(4)
    home = send(policy, Keys(prefixes=(1, 2), is_chat=True))
    later = (1, 2, 3, 4)
    policy.loads.set(home, 7)
    assert policy.choose(Keys(prefixes=later, is_chat=True)) == home
    assert policy.choose(Keys(prefixes=later)) != home  # pieces of a text do not say what they belong to
    policy.loads.set(home, 8)
    assert policy.choose(Keys(prefixes=later, is_chat=True)) != home


def test_a_replica_that_computes_few_at_a_time_keeps_no_longer_queue() -> None:
    policy = policy_of(4, max_own=2)
    home = send(policy, Keys(prefixes=(1, 2), is_chat=True))
    policy.loads.set(home, 2)
    assert policy.choose(Keys(prefixes=(1, 2, 3, 4), is_chat=True)) != home


def test_new_chats_with_the_same_system_prompt_are_spread() -> None:
    policy = policy_of(4)
    homes = [send(policy, Keys(prefixes=(1, number), is_chat=True)) for number in range(100, 140)]
    assert {homes.count(replica) for replica in range(4)} == {10}


def test_a_chat_that_many_send_is_spread() -> None:
    policy = policy_of(4)
    homes = [send(policy, Keys(prefixes=(1, 2), is_chat=True)) for _ in range(40)]
    assert {homes.count(replica) for replica in range(4)} == {10}


def test_routers_hear_of_each_others_chats() -> None:
    policy = policy_of(4)
    policy.publish(2, held=[1, 2], whole=[2])
    policy.loads.set(2, 7)
    assert policy.choose(Keys(prefixes=(1, 2, 3), is_chat=True)) == 2
    assert policy.choose(Keys(prefixes=(1, 5, 3), is_chat=True)) != 2
    policy.publish(2, held=[1, 2])
    assert policy.choose(Keys(prefixes=(1, 2, 3), is_chat=True)) != 2


def test_memory_is_bounded() -> None:
    policy = policy_of(3, remembered=100)
    sizes = []
    tracemalloc.start()
    for number in range(3000):
        send(policy, Keys(prefixes=(number,), is_chat=True))
        if number % 1000 == 999:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # A chat takes a hundred bytes at least, and a thousand more of them would take a hundred thousand.
    assert abs(sizes[2] - sizes[0]) < 20_000


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(("session", "text", "chat")), st.booleans()), max_size=200),
    st.floats(1.05, 3),
)
def test_the_load_is_bounded(replicas: int, requests: list[tuple[int, str, bool]], most: float) -> None:
    """With any requests, no replica gets more than its limit."""
    policy, chance, running = policy_of(replicas, most_load=most), random.Random(0), []
    turns = [0] * 6
    for number, kind, ends in requests:
        keys = Keys(session=hash_of(b"s", number)) if kind == "session" else Keys(prefixes=(number,))
        if kind == "chat":
            turns[number] += 1
            keys = Keys(prefixes=[hash_of(b"chat", turn) for turn in range(turns[number])], is_chat=True)
        limit = max(8 if kind == "chat" else 2, math.ceil(most * (len(running) + 1) / replicas))
        replica = send(policy, keys)
        assert policy.loads[replica] <= limit
        running.append(replica)
        if ends:
            policy.loads.add(running.pop(chance.randrange(len(running))), -1)
    assert sum(policy.loads[replica] for replica in range(replicas)) == len(running)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 11))), max_size=100))
def test_models_are_used_where_they_are_loaded(replicas: int, requests: list[tuple[int, set[int]]]) -> None:
    """As long as one of those that have it has fewer than 8 requests, and none of them gets too many."""
    policy = policy_of(replicas, loads_models=True)
    holders: dict[int, set[int]] = {}
    for number, (model, new) in enumerate(requests):
        holders[model] = {replica for replica in new if replica < replicas}
        for replica in range(replicas):
            policy.publish_models(replica, [one for one, having in holders.items() if replica in having])
        limit = max(8, math.ceil(1.5 * (number + 1) / replicas))
        with_room = {replica for replica in holders[model] if policy.loads[replica] < limit}
        chosen = send(policy, Keys(model=model, prefixes=(number,)))
        assert chosen in (with_room or range(replicas))
        assert policy.loads[chosen] <= limit


def test_few_keys_move_when_a_member_goes() -> None:
    before, after = HashRing(range(10)), HashRing(range(9))
    moved = 0
    for number in range(2000):
        key = hash_of(b"key", number)
        was, now = before.find(key, lambda _: True), after.find(key, lambda _: True)
        assert was == now or was == 9
        moved += was != now
    assert 100 < moved < 320  # a tenth, as good as the points are spread
