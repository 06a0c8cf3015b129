"""Keys with several owners on one server: a tenant cannot see another's data, whatever it tries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from server.conftest import RunningServer, StartServer
from server.redis_servers import redis_server
from server.waiting import eventually

KEYS = """
alice-1 name=alice
alice-2 name=alice
bob-1 name=bob
root admin
"""
LONG = "SAY(tide)YAS " * 40
ABSENT = "0" * 32


class Tenants(NamedTuple):
    """A server, and a client of it for each key."""

    server: RunningServer
    alice: httpx.Client
    bob: httpx.Client
    root: httpx.Client


def as_key(server: RunningServer, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=60)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return file


@pytest.fixture(scope="module", params=["memory", "folder", "redis"])
def tenants(
    request: pytest.FixtureRequest, start_server: StartServer, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenants]:
    def started(**options: Any) -> Tenants:
        folder = tmp_path_factory.mktemp("batches")
        server = start_server(engine={"step_s": 0.001}, api_key_file=str(key_file), batch_dir=str(folder), **options)
        return Tenants(server, *(as_key(server, key) for key in ("alice-1", "bob-1", "root")))

    if request.param == "redis":
        with redis_server() as url:
            yield started(shared_store=url)
    elif request.param == "folder":
        yield started(shared_store=str(tmp_path_factory.mktemp("store")))
    else:
        yield started()


in_memory = pytest.mark.parametrize("tenants", ["memory"], indirect=True)


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def upload(client: httpx.Client, rows: int = 1, prompt: str = "SAY(tide)YAS", **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 8, **fields}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(rows)]
    content = "\n".join(map(json.dumps, lines)).encode()
    made = ok(client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}))
    return str(made["id"])


def start_batch(client: httpx.Client, file_id: str) -> httpx.Response:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return client.post("/v1/batches", json=asked)


def ended(client: httpx.Client, batch_id: str) -> Any:
    def has_ended() -> bool:
        return ok(client.get(f"/v1/batches/{batch_id}"))["status"] in ("completed", "failed", "cancelled")

    eventually(has_ended, "the batch does not end")
    return ok(client.get(f"/v1/batches/{batch_id}"))


def respond(client: httpx.Client, **body: Any) -> Any:
    return ok(client.post("/v1/responses", json={"input": "SAY(secret)YAS", **body}))


def cached(client: httpx.Client, prompt: str = LONG, **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    usage = ok(client.post("/v1/completions", json=body))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


# Some hundred requests, while a batch runs.
def test_what_is_anothers_is_not_there(tenants: Tenants) -> None:
    """On every path with an id, in every field with an id, and in every list."""
    _, alice, bob, root = tenants
    response = respond(alice)
    running = respond(alice, input="LOOP(x)", background=True, stream=False, max_output_tokens=5000)
    file_id = upload(alice)
    batch = ended(alice, ok(start_batch(alice, file_id))["id"])
    slow = ok(start_batch(alice, upload(alice, 500)))
    ids = {
        "responses": (response["id"], running["id"]),
        "files": (file_id, batch["output_file_id"]),
        "batches": (batch["id"], slow["id"]),
    }
    paths = ok(bob.get("/openapi.json"))["paths"]
    tried = set()
    for path, operations in paths.items():
        kind = path.removeprefix("/v1").split("/")[1]
        if "{id}" not in path or kind not in ids:
            continue
        tried.add(path.removeprefix("/v1"))
        for method in operations:
            for one in ids[kind]:
                absent = re.sub("[0-9a-f]{32}$", ABSENT, one)
                for client in (bob, root):
                    answers = [client.request(method, path.replace("{id}", name)) for name in (one, absent)]
                    assert [answer.status_code for answer in answers] == [404, 404], (method, path)
                    foreign, nobodys = (answer.text.replace(one, ABSENT).replace(absent, ABSENT) for answer in answers)
                    assert foreign == nobodys
    assert tried == {
        *("/responses/{id}", "/responses/{id}/cancel", "/responses/{id}/input_items"),
        *("/files/{id}", "/files/{id}/content", "/batches/{id}", "/batches/{id}/cancel"),
    }
    said = response["output"][0]["id"]
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/responses", {"input": "hi", "previous_response_id": response["id"]}, response["id"]),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": said}]}, said),
        ("/v1/responses/input_tokens", {"input": "hi", "previous_response_id": response["id"]}, response["id"]),
        ("/v1/batches", {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}, file_id),
    ]
    for path, body, one in bodies:
        absent = one[: one.index("_" if "_" in one else "-") + 1] + ABSENT
        text = json.dumps(body)
        answers = [bob.post(path, json=json.loads(text.replace(one, name))) for name in (one, absent)]
        assert {answer.status_code for answer in answers} <= {400, 404}, answers[0].text
        assert answers[0].text.replace(one, ABSENT) == answers[1].text.replace(absent, ABSENT)
        assert alice.post(path, json=body).status_code == 200
    for client in (bob, root):
        assert ok(client.get("/v1/files"))["data"] == []
        assert ok(client.get("/v1/batches"))["data"] == []
        assert client.get("/v1/batches", params={"after": batch["id"]}).status_code == 404
    assert ok(alice.get(f"/v1/responses/{response['id']}")) == response
    assert ok(alice.get(f"/v1/responses/{running['id']}"))["status"] in ("queued", "in_progress")
    assert ok(alice.post(f"/v1/responses/{running['id']}/cancel"))["status"] == "cancelled"
    assert ok(alice.get(f"/v1/batches/{slow['id']}"))["status"] in ("validating", "in_progress", "completed")
    assert ok(alice.post(f"/v1/batches/{slow['id']}/cancel"))["status"] in ("cancelling", "cancelled", "completed")
    assert ok(alice.get(f"/v1/files/{file_id}"))["id"] == file_id
    assert "tide" in alice.get(f"/v1/files/{batch['output_file_id']}/content").text


def test_another_key_of_the_owner_sees_what_is_theirs(tenants: Tenants) -> None:
    made = respond(tenants.alice)
    with as_key(tenants.server, "alice-2") as alice:
        assert ok(alice.get(f"/v1/responses/{made['id']}")) == made
        file_id = upload(tenants.alice)
        assert file_id in [file["id"] for file in ok(alice.get("/v1/files"))["data"]]
        assert ok(alice.delete(f"/v1/files/{file_id}"))["deleted"]


def test_nothing_says_whose_it_is(tenants: Tenants) -> None:
    file_id = upload(tenants.alice)
    batch = ok(start_batch(tenants.alice, file_id))
    made = respond(tenants.alice)
    for path in (f"/v1/files/{file_id}", "/v1/files", f"/v1/batches/{batch['id']}", "/v1/batches"):
        assert not re.search("owner|alice", tenants.alice.get(path).text)
    assert not re.search("owner|alice", tenants.alice.get(f"/v1/responses/{made['id']}").text)
    ended(tenants.alice, batch["id"])


@in_memory
def test_prefixes_are_found_by_their_owner_alone(tenants: Tenants) -> None:
    server, alice, bob, root = tenants
    assert cached(alice) == 0
    assert cached(alice) > 0
    with as_key(server, "alice-2") as other:
        assert cached(other) > 0
    for salt in (None, "alice", "", "\n", "alice\n"):
        assert cached(bob, cache_salt=salt) == 0, salt
    assert cached(root) == 0
    assert cached(alice, cache_salt="mine") == 0
    assert cached(alice, cache_salt="mine") > 0
    conversation = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    for path, usage_of in (
        ("/v1/chat/completions", lambda usage: usage["prompt_tokens_details"]["cached_tokens"]),
        ("/v1/messages", lambda usage: usage["cache_read_input_tokens"]),
    ):
        ok(alice.post(path, json=conversation))
        assert usage_of(ok(alice.post(path, json=conversation))["usage"]) > 0
    assert ok(bob.post("/v1/messages", json=conversation))["usage"]["cache_read_input_tokens"] == 0


@in_memory
def test_a_batch_runs_as_its_owner(tenants: Tenants) -> None:
    prompt = "a batch's own prompt " * 8
    ended(tenants.alice, ok(start_batch(tenants.alice, upload(tenants.alice, prompt=prompt)))["id"])
    assert cached(tenants.bob, prompt) == 0
    assert cached(tenants.alice, prompt) > 0


def test_prefixes_can_be_shared(start_server: StartServer, key_file: Path) -> None:
    server = start_server(api_key_file=str(key_file), share_prefix_cache=True)
    with as_key(server, "alice-1") as alice, as_key(server, "bob-1") as bob:
        assert cached(alice) == 0
        assert cached(bob) > 0
        assert bob.get(f"/v1/responses/{respond(alice)['id']}").status_code == 404


def test_stored_responses_make_room_for_those_of_the_same_owner(start_server: StartServer) -> None:
    server = start_server(api_keys=("alice", "bob", "carol"), max_stored_responses=6)
    with as_key(server, "alice") as alice, as_key(server, "bob") as bob, as_key(server, "carol") as carol:
        first = [respond(bob)["id"], respond(carol)["id"], respond(carol)["id"]]
        many = [respond(alice)["id"] for _ in range(10)]
        for client, name in zip((bob, carol, carol), first, strict=True):
            assert client.get(f"/v1/responses/{name}").status_code == 200
        kept = [name for name in many if alice.get(f"/v1/responses/{name}").status_code == 200]
        assert kept == many[-3:]
        running = [respond(alice, input="LOOP(x)", background=True, max_output_tokens=5000)["id"] for _ in range(8)]
        assert bob.get(f"/v1/responses/{first[0]}").status_code == 200
        for name in running:
            alice.post(f"/v1/responses/{name}/cancel")


def test_things_from_before_there_were_several_keys(start_server: StartServer, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"batch_dir": str(tmp_path / "batches"), "shared_store": str(tmp_path / "store")}
    with as_key(start_server(api_keys=("alice",), **kept), "alice") as alone:
        file_id, response = upload(alone), respond(alone)
        batch = ended(alone, ok(start_batch(alone, file_id))["id"])
    keys = tmp_path / "keys"
    keys.write_text("alice name=alice\nbob\nroot admin\n")
    server = start_server(api_key_file=str(keys), **kept)
    paths = (f"/v1/files/{file_id}", f"/v1/batches/{batch['id']}", f"/v1/responses/{response['id']}")
    for key, status in (("alice", 404), ("bob", 404), ("root", 200)):
        with as_key(server, key) as client:
            assert {client.get(path).status_code for path in paths} == {status}
    with as_key(server, "alice") as alice, as_key(server, "bob") as bob:
        mine, bobs, answer = upload(alice), upload(bob), respond(alice)
    # Alice's key is exchanged for another one, and bob's stays, after a restart.
    keys.write_text("new-key name=alice\nbob\nroot admin\n")
    rotated = start_server(api_key_file=str(keys), **kept)
    with as_key(rotated, "alice") as old, as_key(rotated, "new-key") as alice, as_key(rotated, "bob") as bob:
        assert old.get(f"/v1/files/{mine}").status_code == 401
        assert [file["id"] for file in ok(alice.get("/v1/files"))["data"]] == [mine]
        assert [file["id"] for file in ok(bob.get("/v1/files"))["data"]] == [bobs]
        assert ok(alice.get(f"/v1/responses/{answer['id']}")) == answer


def test_one_key_alone_is_as_no_key(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one name=us\nother name=us\n")
    for number, options in enumerate(({"api_keys": ("one",)}, {"api_key_file": str(keys)}, {})):
        folder = str(tmp_path / f"batches-{number}")
        server = start_server(batch_dir=folder, **options)  # type: ignore[arg-type]
        with as_key(server, "one") as one, as_key(server, "other" if number == 1 else "one") as other:
            assert cached(one) == 0
            assert cached(other, cache_salt=None) > 0
            assert other.get(f"/v1/files/{upload(one)}").status_code == 200
            assert other.get(f"/v1/responses/{respond(one)['id']}").status_code == 200
            assert ok(other.get("/server_info"))["version"]
            assert other.post("/reset_prefix_cache").status_code == 200
            assert cached(one, priority=-5) == 0
