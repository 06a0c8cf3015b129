"""Batches of two servers with one folder: either answers for both, one runs a batch, and the other goes on with it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.processes import ScriptedProcess
from server.scripted_engine import CLAIMS, SECONDS

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.batches.store import BatchStore

PATH = "/v1/batches"
# What others have is looked for, and what is answered is written and told, every few moments.
OFTEN = {
    SECONDS: json.dumps(
        {f"server.batches.runner:{name}": 0.05 for name in ("_LOOK_EVERY_S", "_WRITE_EVERY_S", "_SAVE_EVERY_S")}
    )
}
ENDED = ("completed", "failed", "cancelled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[ScriptedProcess]]:
    """The last test kills one of them."""
    running = [ScriptedProcess("--batch-dir", str(folder), environment=OFTEN) for _ in range(2)]
    yield running
    for server in running:
        server.stop()


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def start(client: httpx.Client, count: int, max_tokens: int) -> Any:
    body = {"prompt": "LOOP(x)", "max_tokens": max_tokens}
    rows = [{"custom_id": f"r{i}", "url": "/v1/completions", "method": "POST", "body": body} for i in range(count)]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = ok(client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}))
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return ok(client.post(PATH, json=asked))


def once(client: httpx.Client, batch_id: str, *statuses: str, answers: int = 0) -> Any:
    """The batch, as soon as it has one of these states and `answers` answers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch = ok(client.get(f"{PATH}/{batch_id}"))
        if batch["status"] in statuses and batch["request_counts"]["completed"] >= answers:
            return batch
        assert batch["status"] not in ENDED, batch
        time.sleep(0.05)
    raise AssertionError(f"the batch is not {statuses}")


# One machine gives no sign of life for so long as no busy one does. test_claims.py has the same without servers.
@pytest.mark.sweep
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_another_machine_goes_on_with_a_batch_once_there_is_no_sign_of_life(
    end: signal.Signals, tmp_path: Path
) -> None:
    """Machines differ by their boot, so the kernel does not tell that a server has ended. What lasts is made short."""
    kept = ("--batch-dir", str(tmp_path))
    short = {"lease_s": 5, "abandoned_s": 10}
    gone, other = [
        ScriptedProcess(*kept, environment={**OFTEN, CLAIMS: json.dumps({**short, "boot": boot})})
        for boot in ("a", "b")
    ]
    try:
        made = start(gone.client, 160, 40)
        once(gone.client, made["id"], "in_progress", answers=8)
        (claim,) = tmp_path.glob("*.claim-*")
        if json.loads(claim.read_bytes())["pid"] != gone.process.pid:
            gone, other = other, gone
        gone.process.send_signal(end)
        batch = once(other.client, made["id"], *ENDED)
        assert batch["request_counts"] == {"total": 160, "completed": 160, "failed": 0}
        content = other.client.get(f"/v1/files/{batch['output_file_id']}/content").text
        assert sorted(json.loads(line)["custom_id"] for line in content.splitlines()) == sorted(
            f"r{i}" for i in range(160)
        )
        if end == signal.SIGSTOP:
            gone.process.send_signal(signal.SIGCONT)
            once(gone.client, made["id"], "completed")
            deadline = time.monotonic() + 60
            while "left to another server" not in gone.log:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert other.client.get(f"/v1/files/{batch['output_file_id']}/content").text == content
        assert [*tmp_path.glob("*.claim-*")] == []
    finally:
        for server in (gone, other):
            server.stop()


def test_either_cancels_and_each_runs_its_own(servers: list[ScriptedProcess], folder: Path) -> None:
    batches = [start(servers[0].client, 2000, 50) for _ in range(2)]
    for batch in batches:
        once(servers[1].client, batch["id"], "in_progress")
    owners = {json.loads(claim.read_bytes())["pid"] for claim in folder.glob("*.claim-*")}
    assert owners == {server.process.pid for server in servers}
    for batch in batches:
        assert ok(servers[1].client.post(f"{PATH}/{batch['id']}/cancel"))["status"] in ("cancelling", "cancelled")
    for batch in batches:
        assert once(servers[0].client, batch["id"], *ENDED)["status"] == "cancelled"
    listed = ok(servers[1].client.get(PATH))["data"]
    assert {batch["id"] for batch in batches} <= {batch["id"] for batch in listed}
    needed = batches[0]["input_file_id"]
    assert ok(servers[1].client.delete(f"/v1/files/{needed}"))["deleted"] is True
    assert servers[0].client.get(f"/v1/files/{needed}").status_code == 404


def test_a_damaged_entry_spoils_no_other(servers: list[ScriptedProcess], folder: Path) -> None:
    made = start(servers[0].client, 2, 2)
    for name in (f"batch-{'1' * 32}.json", f"file-{'2' * 32}.json"):
        (folder / name).write_bytes(b'{"id": 1}')
    os.mkfifo(folder / f"batch-{'3' * 32}.json")
    assert once(servers[1].client, made["id"], *ENDED)["status"] == "completed"
    assert servers[0].client.get(f"{PATH}/batch-{'1' * 32}").status_code == 404
    assert "is damaged, and left out" in servers[0].log


def test_a_folder_that_cannot_be_used_is_named() -> None:
    with pytest.raises(TidewheelError, match=r"^--batch-dir /dev/null/batches cannot be used: Not a directory$"):
        BatchStore(Path("/dev/null/batches"))


# 160 requests are answered slowly enough for a server to be killed meanwhile.
def test_a_batch_of_a_server_that_is_killed_is_finished_by_the_other(
    servers: list[ScriptedProcess], folder: Path
) -> None:
    made = start(servers[0].client, 160, 40)
    for server in servers:
        assert once(server.client, made["id"], "in_progress", answers=8)["request_counts"]["total"] == 160
    (claim,) = folder.glob("*.claim-*")  # of one of them alone
    (killed,) = (server for server in servers if server.process.pid == json.loads(claim.read_bytes())["pid"])
    killed.process.send_signal(signal.SIGKILL)
    (other,) = (server for server in servers if server is not killed)
    batch = once(other.client, made["id"], *ENDED)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 160, "completed": 160, "failed": 0})
    lines = other.client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"r{i}" for i in range(160))
    assert [*folder.glob("*.claim-*")] == []
