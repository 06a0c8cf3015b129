"""The promise of a digest: equal ones mean equal content of KV blocks."""

from __future__ import annotations

import numpy as np

from tidewheel.engine.cache.identity import Identity

PLAIN = Identity()


def chain(*token_lists: list[int], identity: Identity = PLAIN) -> list[bytes]:
    digests, parent, start = [], identity.root, 0
    for tokens in token_lists:
        parent = identity.block_digest(parent, start, np.array(tokens, dtype=np.int32))
        digests.append(parent)
        start += len(tokens)
    return digests


def test_a_digest_says_everything_that_came_before_it() -> None:
    first, second = chain([1, 2], [3, 4])
    assert chain([1, 2], [3, 4]) == [first, second]
    assert chain([1, 9], [3, 4])[1] != second
    assert chain([3, 4])[0] not in (first, second)


def test_digests_are_the_same_in_every_process() -> None:
    assert chain([1, 2, 3, 4])[0].hex() == "f6c708760a5e1d7a93376fdefe73e133"


def test_salts_and_adapters_share_no_block() -> None:
    identities = [
        PLAIN,
        Identity(salt=""),
        Identity(salt="a"),
        Identity(salt="b"),
        Identity(adapter=""),
        Identity(adapter="a"),
        Identity(adapter="a", salt="b"),
        Identity(adapter="asalt:b"),
        Identity(salt="adapter:a"),
    ]
    assert len({chain([1, 2], identity=identity)[0] for identity in identities}) == len(identities)


def test_media_tell_apart_the_block_that_they_begin_in_and_those_behind_it() -> None:
    tokens = [1, 2], [3, 4], [5, 6]
    plain = chain(*tokens)
    cat, dog = (chain(*tokens, identity=Identity(media=((3, digest),))) for digest in (b"cat", b"dog"))
    assert cat[0] == dog[0] == plain[0]
    for behind in (1, 2):
        assert len({plain[behind], cat[behind], dog[behind]}) == 3
    moved = chain(*tokens, identity=Identity(media=((2, b"cat"),)))
    assert moved[1] != cat[1]
