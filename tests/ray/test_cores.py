"""Cores are shared out among the replicas of a node: each belongs to one, until that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.engine.errors import TidewheelError
from tidewheel.ray.cores import claim_cores

CPUS = [0, 1, 2, 3]


def test_no_core_is_given_twice(tmp_path: Path) -> None:
    first = claim_cores(1, tmp_path, available=CPUS)
    second = claim_cores(3, tmp_path, available=CPUS)
    assert sorted([*first.cpus, *second.cpus]) == CPUS
    with pytest.raises(TidewheelError, match="fewer of this node's 4 are free"):
        claim_cores(1, tmp_path, wait_s=0.05, available=CPUS)
    second.release()
    assert claim_cores(3, tmp_path, wait_s=0, available=CPUS).cpus == second.cpus


def test_more_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(TidewheelError, match="may use only 4"):
        claim_cores(5, tmp_path, available=CPUS)


def test_a_failed_claim_holds_nothing(tmp_path: Path) -> None:
    held = claim_cores(2, tmp_path, available=CPUS)
    with pytest.raises(TidewheelError):
        claim_cores(3, tmp_path, wait_s=0, available=CPUS)
    assert len(claim_cores(2, tmp_path, wait_s=0, available=CPUS).cpus) == 2
    held.release()


def test_a_process_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time; from tidewheel.ray.cores import claim_cores\n"
        "claimed = claim_cores(4, pathlib.Path(sys.argv[1]), available=[0, 1, 2, 3]); print('ok', flush=True)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ok\n"
        with pytest.raises(TidewheelError):
            claim_cores(1, tmp_path, wait_s=0, available=CPUS)
        other.kill()
        other.wait()
    assert len(claim_cores(4, tmp_path, wait_s=5, available=CPUS).cpus) == 4


def test_all_threads_are_bound(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib, threading; from tidewheel.ray.cores import claim_cores\n"
        "stop = threading.Event(); thread = threading.Thread(target=stop.wait); thread.start()\n"
        "claimed = claim_cores(1, pathlib.Path(sys.argv[1])); claimed.bind()\n"
        "sets = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir('/proc/self/task')}\n"
        "stop.set(); print(sets == {frozenset(claimed.cpus)})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(TidewheelError, match="belongs to another user"):
        claim_cores(1, tmp_path, available=CPUS)
