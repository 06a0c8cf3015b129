"""The server under its image's conditions: process 1 behind tini, a user without a home, nothing that it may write."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import pytest
from server.conftest import TIDEWHEEL, is_healthy
from system_tools import require

ROOT = Path(__file__).parents[2]

# A name space where /proc shows only its own processes and all else is read-only. The user may read what only root
# can, since the tests may be installed in such a place.
CONTAIN = """
mount -t proc proc /proc
mount -o remount,bind,ro /
if mountpoint -q /tmp; then mount -o remount,bind,ro /tmp; fi
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search -- "$@"
"""

# The device says that it loads, and goes on until it is ended.
NEVER_LOADS = """
import sys, threading
from tidewheel.engine.loading import opened_model
from tidewheel.server.commands.cli import main
def get_device(*_):
    print("loading", flush=True)
    threading.Event().wait()
opened_model.get_device = get_device
sys.exit(main(sys.argv[1:]))
"""

WITHOUT_UVLOOP = """
import sys
sys.modules["uvloop"] = None
from tidewheel.server.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


@cache
def _forbidden() -> str | None:
    """What keeps this process from playing a container."""
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", "mount -t proc proc /proc && mount -o remount,bind,ro /"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else f"no name spaces here: {done.stderr.strip()}"


def entry_point() -> list[str]:
    """The command that the image starts, with this installation's command instead of `tidewheel`."""
    match = re.search(r"^ENTRYPOINT (\[.*\])$", (ROOT / "Dockerfile.cpu").read_text(), re.MULTILINE)
    assert match is not None
    words: list[str] = json.loads(match[1])
    assert words[-2:] == ["tidewheel", "serve"]
    return words[:-2]


@contextmanager
def contained(*command: str) -> Iterator[subprocess.Popen[str]]:
    """The entry point with a command as process 1, in an environment as bare as a container's."""
    for tool in ("tini", "setpriv", "unshare"):
        require(tool)
    if (reason := _forbidden()) is not None:
        pytest.skip(reason)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/nonexistent"}
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", CONTAIN, "sh", *entry_point(), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",  # with -c, Python would look for the package in the current folder first
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Sends process 1 a SIGTERM, as `docker stop` does. Returns its exit code and the log."""
    first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    os.kill(int(first), signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    return process.returncode, log


def wait_until_healthy(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + 60
    while not is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate()[1])
        time.sleep(0.05)


# A server starts.
def test_it_serves_where_nothing_can_be_written_and_ends_when_told(unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    with contained(*TIDEWHEEL, "serve", "--port", str(unused_port)) as process:
        wait_until_healthy(process, url)
        messages = [{"role": "user", "content": "Who are you?"}]
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}
        answers = [
            httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, **more}, timeout=60, trust_env=False)
            for more in (
                {},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            )
        ]
        code, log = end(process)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert code == 0
    assert "Traceback" not in log
    assert "Read-only" not in log
    assert "Permission" not in log


def test_a_start_can_be_ended(unused_port: int) -> None:
    """As process 1 itself it would not be: what has no handler yet is not delivered to one."""
    with contained(sys.executable, "-c", NEVER_LOADS, "serve", "--port", str(unused_port)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        code, _ = end(process)
    assert code == 128 + signal.SIGTERM


# A server starts.
def test_without_uvloop_it_serves_on_asyncios_loop(unused_port: int, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    command = [sys.executable, "-c", WITHOUT_UVLOOP, "serve", "--port", str(unused_port)]
    # With -c, Python would look for the package in the current folder first.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        wait_until_healthy(process, url)
        body = {"prompt": "The tide turns", "stream": True}
        stream = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        process.terminate()
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert stream.text.endswith("data: [DONE]\n\n")
    assert "uvloop is not installed: using asyncio's own event loop" in log
