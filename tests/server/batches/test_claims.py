"""Claims on batches: of several servers with one folder, one has a batch, until it lets go of it or has died."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidewheel.server.batches.claims import Claim, Claims

BATCH = "batch-" + "0" * 32
DIES = f"""
import os, sys
from pathlib import Path
from tidewheel.server.batches.claims import Claims
assert Claims(Path(sys.argv[1])).take("{BATCH}")
os._exit(9)
"""


def test_one_of_many_has_a_batch(tmp_path: Path) -> None:
    claims = [Claims(tmp_path) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(20):
            taken = [claim for claim in pool.map(lambda one: one.take(BATCH), claims) if claim is not None]
            assert len(taken) <= 1
            if taken:
                assert taken[0].beat()
                assert all(one.take(BATCH) is None for one in claims)
                taken[0].release()
    assert [*tmp_path.iterdir()] == []


def test_a_batch_of_a_process_that_was_killed_is_free_at_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", DIES, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 9
    assert len([*tmp_path.iterdir()]) == 1
    claim = Claims(tmp_path).take(BATCH)
    assert claim is not None
    assert claim.beat()
    assert len([*tmp_path.iterdir()]) == 1
    claim.release()


def test_another_machines_batch_is_free_when_it_gives_no_sign_of_life(tmp_path: Path) -> None:
    here = Claims(tmp_path, boot="a", lease_s=0.2, abandoned_s=0.4)
    elsewhere = Claims(tmp_path, boot="b", lease_s=0.2, abandoned_s=0.4)
    alive = here.take(BATCH)
    assert alive is not None
    for _ in range(6):
        assert elsewhere.take(BATCH) is None
        time.sleep(0.1)
        assert alive.beat()
    taken = waited_for(elsewhere)
    assert not alive.is_held  # it noticed by itself, before another server could take the batch
    assert not alive.beat()
    assert taken.beat()
    alive.release()
    assert taken.beat()
    taken.release()
    assert [*tmp_path.iterdir()] == []


def test_who_was_overtaken_notices(tmp_path: Path) -> None:
    slow = Claims(tmp_path, boot="a", lease_s=60).take(BATCH)  # as if its clock had stood still
    assert slow is not None
    taken = waited_for(Claims(tmp_path, boot="b", abandoned_s=0.1))
    assert not slow.beat()
    assert taken.beat()
    slow.release()
    assert taken.beat()
    taken.release()


def waited_for(claims: Claims) -> Claim:
    deadline = time.monotonic() + 10
    while (claim := claims.take(BATCH)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return claim
