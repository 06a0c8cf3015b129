"""Responses of two servers that share a store: either of them answers for both."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from server.conftest import StartServer, named_events
from server.redis_servers import redis_server
from server.waiting import eventually

from tidewheel.server.responses import shared
from tidewheel.server.stores.base import Kind
from tidewheel.server.stores.folder import FolderStore

PATH = "/v1/responses"


class Replicas(NamedTuple):
    """Two servers; `folder` is where their store is, if it is one."""

    one: httpx.Client
    other: httpx.Client
    folder: Path | None

    def files(self, kind: str) -> list[Path]:
        assert self.folder is not None
        return [*(self.folder / "tidewheel-store" / kind).iterdir()]


@pytest.fixture(scope="module", autouse=True)
def _looks_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_LOOK_EVERY_S", 0.02)
        patch.setattr(shared, "_SIGN_EVERY_S", 3600.0)  # what a test removes stays away
        yield


@pytest.fixture(scope="module", params=["folder", "redis"])
def replicas(
    request: pytest.FixtureRequest, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    def started(store: str, folder: Path | None) -> Replicas:
        options: dict[str, Any] = {"engine": {"step_s": 0.01}, "shared_store": store, "tool_call_parser": "hermes"}
        return Replicas(start_server(**options).http, start_server(**options).http, folder)

    if request.param == "redis":
        with redis_server() as url:
            yield started(url, None)
    else:
        folder = tmp_path_factory.mktemp("store")
        yield started(str(folder), folder)


# For tests that look into the files.
in_folder = pytest.mark.parametrize("replicas", ["folder"], indirect=True)


def say(text: str) -> str:
    return f"SAY({text})YAS"


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def create(client: httpx.Client, **body: Any) -> Any:
    return ok(client.post(PATH, json=body))


def ended(client: httpx.Client, response_id: str) -> Any:
    for _ in range(200):
        response = ok(client.get(f"{PATH}/{response_id}"))
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.05)
    raise AssertionError("the response did not end")


def test_a_conversation_goes_from_one_to_the_other(replicas: Replicas) -> None:
    one, other, _ = replicas
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    first = create(one, input=say("One."), tools=[tool], top_logprobs=2, text={"format": {"type": "text"}})
    assert ok(other.get(f"{PATH}/{first['id']}")) == first
    stream = other.post(PATH, json={"input": say("Two."), "previous_response_id": first["id"], "stream": True})
    second = named_events(stream)[-1]["response"]
    assert ok(one.get(f"{PATH}/{second['id']}")) == second
    items = ok(one.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"}))["data"]
    assert [item["content"][0]["text"] for item in items] == [say("One."), "One.", say("Two.")]
    said = second["output"][0]
    referred = create(one, input=[{"id": said["id"]}, {"role": "user", "content": say("Three.")}])
    assert ok(other.get(f"{PATH}/{referred['id']}/input_items"))["data"][1]["id"] == said["id"]
    assert ok(other.delete(f"{PATH}/{first['id']}"))["deleted"] is True
    for client in (one, other):
        assert client.get(f"{PATH}/{first['id']}").status_code == 404
        gone = client.post(PATH, json={"input": "hi", "previous_response_id": first["id"]}).json()["error"]
        assert gone["code"] == "previous_response_not_found"
        assert "30 days" in gone["message"]


def test_what_runs_at_one_is_cancelled_and_deleted_at_the_other(replicas: Replicas) -> None:
    one, other, _ = replicas
    running = create(one, input="LOOP(x)", background=True, max_output_tokens=5000)
    assert ok(other.get(f"{PATH}/{running['id']}"))["status"] in ("queued", "in_progress")
    early = other.post(PATH, json={"input": "hi", "previous_response_id": running["id"]})
    assert early.status_code == 400
    assert ok(other.post(f"{PATH}/{running['id']}/cancel"))["status"] == "cancelled"
    assert ended(one, running["id"])["status"] == "cancelled"
    assert ok(other.post(f"{PATH}/{running['id']}/cancel"))["status"] == "cancelled"
    again = create(one, input="LOOP(x)", background=True, max_output_tokens=5000)
    assert ok(other.delete(f"{PATH}/{again['id']}"))["deleted"] is True
    # It may just be ending there.
    eventually(lambda: one.get(f"{PATH}/{again['id']}").status_code == 404, "a deleted response is still answered")
    kept = create(other, input=say("done"), background=True)
    assert ended(one, kept["id"])["output"][0]["content"][0]["text"] == "done"
    plain = create(one, input="hi")
    assert other.post(f"{PATH}/{plain['id']}/cancel").status_code == 400


def test_events_of_one_are_read_at_the_other(replicas: Replicas) -> None:
    one, other, _ = replicas
    with one.stream("POST", PATH, json={"input": say("a" * 30), "background": True, "stream": True}) as stream:
        lines = stream.iter_lines()
        response_id = next(line for line in lines if '"id":"resp_' in line).partition('"id":"')[2].partition('"')[0]
        late = named_events(other.get(f"{PATH}/{response_id}", params={"stream": "true", "starting_after": 2}))
    assert [event["sequence_number"] for event in late] == [*range(3, 3 + len(late))]
    assert late[-1]["response"]["output"][0]["content"][0]["text"] == "a" * 30
    again = named_events(one.get(f"{PATH}/{response_id}", params={"stream": "true", "starting_after": 2}))
    assert again == late


@in_folder
def test_a_response_whose_replica_has_gone_has_failed(replicas: Replicas) -> None:
    running = create(replicas.one, input="LOOP(x)", background=True, max_output_tokens=5000)
    for sign in replicas.files("running"):
        sign.unlink()  # as if it had given none for a while
    response = ok(replicas.other.get(f"{PATH}/{running['id']}"))
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "has ended" in response["error"]["message"]
    replicas.one.post(f"{PATH}/{running['id']}/cancel")


@in_folder
@pytest.mark.parametrize("after", [2, 2**62])
def test_who_reads_its_events_is_told_whatever_they_have_read(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """A client may name any number, and costs no memory by that."""
    one, other, _ = replicas
    reads: list[str] = []
    plain_get = FolderStore.get

    def get(store: FolderStore, kind: Kind, key: str) -> Awaitable[bytes | None]:
        reads.append(kind.name)
        return plain_get(store, kind, key)

    monkeypatch.setattr(FolderStore, "get", get)
    body = {"input": "LOOP(x)", "background": True, "stream": True, "max_output_tokens": 5000}
    with one.stream("POST", PATH, json=body) as stream:
        lines = stream.iter_lines()
        response_id = next(line for line in lines if '"id":"resp_' in line).partition('"id":"')[2].partition('"')[0]
        params = {"stream": "true", "starting_after": after}
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(other.get, f"{PATH}/{response_id}", params=params)
            eventually(lambda: reads.count("running") > 2, "it does not wait for the end")
            for sign in replicas.files("running"):
                sign.unlink()
            (event,) = named_events(reading.result())
    assert (event["type"], event["sequence_number"]) == ("response.failed", after + 1)
    one.post(f"{PATH}/{response_id}/cancel")


@in_folder
def test_a_damaged_response_is_its_own_requests_error(replicas: Replicas) -> None:
    before = {*replicas.files("responses")}
    broken = create(replicas.one, input="hi")
    (file,) = {*replicas.files("responses")} - before
    for damage in (b"", b'{"response": 1}', b"\xff\xfe", b"[" * 100_000):
        file.write_bytes(damage)
        answer = replicas.other.get(f"{PATH}/{broken['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "damaged_response")
        whole = create(replicas.other, input="hi")
        assert ok(replicas.one.get(f"{PATH}/{whole['id']}")) == whole


def test_without_its_store_a_server_answers_what_needs_none(start_server: StartServer) -> None:
    with redis_server() as url:
        server = start_server(shared_store=url)
        kept = create(server.http, input="hi")
    for answer in (
        server.post(PATH, {"input": "hi"}),
        server.post(PATH, {"input": "hi", "background": True}),
        server.post(PATH, {"input": "hi", "previous_response_id": kept["id"]}),
        server.http.get(f"{PATH}/{kept['id']}"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    last = named_events(server.post(PATH, {"input": "hi", "stream": True}))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert create(server.http, input=say("yes"), store=False)["output"][0]["content"][0]["text"] == "yes"
