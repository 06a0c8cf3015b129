"""`/v1/files` and `/v1/batches`, with the openai client and with other clients."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server.conftest import RunningServer, StartProcess, StartServer
from server.waiting import eventually
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

TEXT = {"prompt": "SAY(tide)YAS", "max_tokens": 8}
FORM = {"content-type": "multipart/form-data; boundary=b"}


def requests(count: int, url: str = "/v1/completions", **fields: Any) -> bytes:
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": {**TEXT, **fields}} for i in range(count)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches") / "kept"


@pytest.fixture(scope="module")
def server(start_server: StartServer, folder: Path) -> RunningServer:
    return start_server(batch_dir=str(folder), api_keys=("key",))


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as sdk:
        yield sdk


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled"):
            return batch
        time.sleep(0.05)
    raise AssertionError("the batch did not end")


def start(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    answers = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {answer["custom_id"]: answer for answer in answers}


def test_a_batch_from_file_to_answers(client: openai.OpenAI) -> None:
    content = requests(20) + b'{"custom_id": "bad", "url": "/v1/completions", "body": {"heat": 1}}\n'
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    assert file.id in [one.id for one in client.files.list()]
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
    )
    batch = ended(client, made.id)
    assert (batch.status, batch.metadata) == ("completed", {"who": "me"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    found = lines(client, batch.output_file_id)
    assert len(found) == 20
    direct = client.completions.create(model=client.models.list().data[0].id, **TEXT)  # type: ignore[arg-type]
    assert found["r7"]["response"]["body"]["choices"][0]["text"] == direct.choices[0].text
    assert lines(client, batch.error_file_id)["bad"]["response"]["status_code"] == 400
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert ended(client, start(client, requests(1)).id).error_file_id is None
    assert all(client.files.content(one.id).content for one in client.files.list())
    client.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_what_is_no_batch_fails_and_says_why(client: openai.OpenAI) -> None:
    nested = requests(1, prompt=[[]] * 2**17)  # which would hold up everyone while it is decoded
    for content, complaint in (
        (b"{\n", "line 1"),
        (b"", "no requests"),
        (requests(1) * 2, "twice"),
        (nested, "'r0': its JSON must have at most 131072 objects, lists and fields"),
    ):
        batch = ended(client, start(client, content).id)
        assert batch.status == "failed"
        assert complaint in batch.errors.data[0].message
    other = ended(client, start(client, requests(1), "/v1/chat/completions").id)
    assert "url must be" in lines(client, other.error_file_id)["r0"]["error"]["message"]
    assert other.output_file_id is None
    with pytest.raises(openai.BadRequestError, match="endpoint must be"):
        start(client, requests(1), "/v1/images")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-0", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match=r"completion_window: .* it takes 24h"):
        client.batches.create(input_file_id="file-0", endpoint="/v1/completions", completion_window="1h")  # type: ignore[arg-type]


def test_no_row_goes_before_others_by_its_own_priority(client: openai.OpenAI, server: RunningServer) -> None:
    known = len(server.engine.requests)
    batch = ended(client, start(client, requests(2, priority=-1000000)).id)
    assert batch.request_counts.completed == 2
    assert all(request.priority > 2**20 for request in server.engine.requests[known:])
    wrong = ended(client, start(client, requests(1, priority="first")).id)
    assert "priority" in lines(client, wrong.error_file_id)["r0"]["error"]["message"]


def test_a_cancelled_batch_keeps_its_answers(client: openai.OpenAI) -> None:
    batch = start(client, requests(3000, max_tokens=200))
    with pytest.raises(openai.BadRequestError, match="needs the file"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    assert ended(client, batch.id).status == "cancelled"
    assert ended(client, start(client, requests(2)).id).status == "completed"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"--b", FORM),
        (b"--b\r\n\r\n", FORM),
        (b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--", FORM),
        (b'--b\r\ncontent-disposition: form-data; name="file"; filename="../../x"\r\n\r\nx\r\n--b--', FORM),
        (b"--c\r\n\r\n--c--", FORM),
        (b"x" * 5000, {"content-type": "multipart/form-data"}),
        (b"{}", {}),
        (b"".join(b'--b\r\ncontent-disposition: form-data; name="%d"\r\n\r\n\r\n' % i for i in range(40)), FORM),
        (b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n\r\n' * 40 + b"--b--\r\n", FORM),
        (b"--b\r\nx-a: " + b"a" * 5000 + b'\r\ncontent-disposition: form-data; name="file"\r\n\r\n\r\n--b--', FORM),
    ],
)
def test_forms_that_are_none(server: RunningServer, body: bytes, headers: dict[str, str]) -> None:
    headers = {"authorization": "Bearer key", **headers}
    answer = server.http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_who_may_upload(server: RunningServer) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--b--'
    assert server.http.post("/v1/files", content=body, headers=FORM).status_code == 401
    page = {**FORM, "authorization": "Bearer key", "origin": "http://elsewhere"}
    assert server.http.post("/v1/files", content=body, headers=page).status_code == 415
    for path in ("/v1/files/..%2f..%2fetc", "/v1/files/file-0/content", "/v1/batches/x"):
        assert server.http.get(path, headers={"authorization": "Bearer key"}).status_code == 404


@pytest.mark.parametrize(
    ("max_bytes", "content", "status"),
    [(1000, requests(100), 507), (100, b"short", 503)],
    ids=["content", "description"],
)
def test_a_file_that_cannot_be_written_leaves_nothing(
    client: openai.OpenAI, folder: Path, max_bytes: int, content: bytes, status: int
) -> None:
    before = set(folder.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        with pytest.raises(openai.APIStatusError, match=r"cannot keep the file|folder of batches cannot") as caught:
            client.files.create(file=("in.jsonl", content), purpose="batch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.status_code == status
    assert set(folder.rglob("*")) == before


@pytest.mark.parametrize("limit", ["9" * 5000, "0", "-1", "1" * 400, "x"])
def test_pages_have_a_limit(server: RunningServer, limit: str) -> None:
    answer = server.http.get(f"/v1/batches?limit={limit}", headers={"authorization": "Bearer key"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_parts_of_a_file(client: openai.OpenAI, server: RunningServer) -> None:
    file = client.files.create(file=("in.jsonl", b"0123456789"), purpose="batch")

    def get(ranges: str) -> Any:
        headers = {"authorization": "Bearer key", "range": ranges}
        return server.http.get(f"/v1/files/{file.id}/content", headers=headers)

    assert (get("bytes=2-4").status_code, get("bytes=2-4").content) == (206, b"234")
    for ranges, status in (("bytes=20-30", 416), ("lines=1-2", 400), ("bytes=", 400)):
        answer = get(ranges)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == "invalid_range"
    assert get("bytes=20-30").headers["content-range"] == "bytes */10"


def test_content_that_is_gone_or_elsewhere(client: openai.OpenAI, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"no newline")
    for replace in (lambda path: None, lambda path: path.symlink_to(secret), lambda path: os.mkfifo(path)):
        file = client.files.create(file=("in.jsonl", requests(1)), purpose="batch")
        path = folder / f"{file.id}.jsonl"
        path.unlink()
        replace(path)
        with pytest.raises(openai.NotFoundError, match="not in the server's folder"):
            client.files.content(file.id)
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert ended(client, made.id).status == "failed"
    assert secret.read_bytes() == b"no newline"


def test_content_that_is_deleted_while_it_is_sent(
    client: openai.OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = client.files.create(file=("in.jsonl", b"content"), purpose="batch")
    answer = FileResponse.__call__

    async def answer_late(response: FileResponse, scope: Scope, receive: Receive, send: Send) -> None:
        (folder / f"{file.id}.jsonl").unlink()
        await answer(response, scope, receive, send)

    monkeypatch.setattr(FileResponse, "__call__", answer_late)
    assert client.files.content(file.id).content == b"content"


def test_what_lies_in_the_folder_names_no_files_elsewhere(client: openai.OpenAI, folder: Path) -> None:
    file = client.files.create(file=("in.jsonl", requests(1)), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    ended(client, made.id)
    described = json.loads((folder / f"{made.id}.json").read_text())
    described |= {"status": "validating", "output_file_id": "../elsewhere", "id": "batch-" + "0" * 32}
    (folder / f"{described['id']}.json").write_text(json.dumps(described))
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(described["id"])
    assert ended(client, start(client, requests(1)).id).status == "completed"
    assert not (folder.parent / "elsewhere.jsonl").exists()
    (folder / f"{described['id']}.json").unlink()


def test_without_a_folder_there_are_none(start_server: StartServer) -> None:
    plain = start_server()
    assert plain.http.get("/v1/files").status_code == 404
    answer = plain.post("/v1/batches", {})
    assert answer.status_code == 404
    assert "--batch-dir FOLDER" in answer.json()["error"]["message"]


# Two processes start, and the second answers what the first has left.
@pytest.mark.sweep
def test_a_restart_goes_on(start_process: StartProcess, tmp_path: Path) -> None:
    first = start_process("--batch-dir", str(tmp_path))
    with openai.OpenAI(base_url=f"{first.client.base_url}/v1", api_key="none", max_retries=0) as client:
        batch = start(client, requests(120, prompt=f"SAY({'tide ' * 10})YAS", max_tokens=64))
        eventually(lambda: client.batches.retrieve(batch.id).output_file_id is not None, "nothing is answered")
    first.stop()
    assert first.log.count("The parameter 'completion_window' of requests has no effect: ") == 1
    second = start_process("--batch-dir", str(tmp_path))
    with openai.OpenAI(base_url=f"{second.client.base_url}/v1", api_key="none", max_retries=0) as client:
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 120)
        text = client.files.content(done.output_file_id).text
    assert len(text.splitlines()) == len({json.loads(line)["custom_id"] for line in text.splitlines()}) == 120
    assert second.client.get("/openapi.json").status_code == 200
