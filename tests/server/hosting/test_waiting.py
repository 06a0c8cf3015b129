"""Requests that wait for their model to be loaded: what their clients see meanwhile, and when it fails."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import events
from server.hosting.conftest import HostServer, StartHost
from server.waiting import eventually

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.loading.load import EngineLoad
from tidewheel.server.hosting import dispatch

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


class Gate:
    """Holds the loads of a test's models until it is opened, and counts them."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.loads = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held, engine = Gate(), EngineLoad.engine

    def behind_the_gate(load: EngineLoad) -> Engine:
        held.loads += 1
        assert held.open.wait(20)
        return engine(load)

    monkeypatch.setattr(EngineLoad, "engine", behind_the_gate)
    monkeypatch.setattr(dispatch, "TICK_S", 0.05)
    yield held
    held.open.set()


@pytest.fixture
def host(start_host: StartHost, dummy_model: Path, tmp_path: Path) -> HostServer:
    """A server whose models are not loaded, with one that cannot be."""
    shutil.copytree(dummy_model, tmp_path / "broken")
    (tmp_path / "broken/config.json").write_text('{"model_type": "none"}')
    models = (f"--model={name}={folder}" for name, folder in (("tiny", dummy_model), ("broken", tmp_path / "broken")))
    return start_host(*models, "--load-format", "dummy")


def asked(host: HostServer, path: str, **fields: Any) -> Any:
    return host.http.stream("POST", path, json={"model": "tiny", "stream": True, **HELLO, **fields})


def comments_and_events(text: str) -> tuple[list[str], str]:
    """The comments that a stream begins with, and the rest."""
    frames = text.split("\n\n")
    comments = [frame for frame in frames if frame.startswith(":")]
    return comments, "\n\n".join(frame for frame in frames if not frame.startswith(":"))


def test_a_stream_says_how_far_its_model_is_until_it_is_there(host: HostServer, gate: Gate) -> None:
    with asked(host, CHAT) as response:
        lines = response.iter_lines()
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        comments = [next(line for line in lines if line) for _ in range(3)]
        assert all(line.startswith(": loading tiny ") for line in comments)
        gate.open.set()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert json.loads(data[0])["model"] == "tiny"
    # Those that come later wait for nothing.
    assert events(host.http.post(CHAT, json={"model": "tiny", "stream": True, **HELLO}))


@pytest.mark.parametrize(("path", "begin"), [(CHAT, "data: "), (MESSAGES, "event: error\ndata: ")])
def test_what_a_model_refuses_after_a_wait_is_an_event(host: HostServer, gate: Gate, path: str, begin: str) -> None:
    gate.open.set()
    with asked(host, path, temperature="warm") as response:
        comments, rest = comments_and_events(response.read().decode())
    assert response.status_code == 200
    assert comments
    assert rest.startswith(begin)
    error = json.loads(rest.removeprefix(begin).partition("\n")[0])["error"]
    assert error["type"] == "invalid_request_error"
    assert "temperature" in error["message"]
    assert rest.endswith("data: [DONE]\n\n") == (path == CHAT)


@pytest.mark.parametrize(("path", "begin"), [(CHAT, "data: "), (MESSAGES, "event: error\ndata: ")])
def test_a_model_that_cannot_be_loaded_is_one_clear_error(host: HostServer, path: str, begin: str) -> None:
    whole = host.http.post(path, json={"model": "broken", **HELLO})
    assert whole.status_code == 500
    said = whole.json()["error"]["message"]
    assert said.startswith("the model 'broken' cannot be loaded: ")
    with asked(host, path, model="broken") as response:
        _, rest = comments_and_events(response.read().decode())
    assert json.loads(rest.removeprefix(begin).partition("\n")[0])["error"]["message"] == said
    assert host.http.post(CHAT, json={"model": "tiny", **HELLO}).status_code == 200
    status = host.http.get("/v1/models/broken").json()["status"]
    assert status["value"] == "failed"
    assert said.endswith(status["error"])


def test_who_leaves_while_a_model_loads_is_not_waited_for(
    host: HostServer, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        host.http.post(CHAT, json={"model": "tiny", **HELLO}, timeout=0.2)
    with asked(host, CHAT) as response:
        assert next(response.iter_lines()).startswith(": loading tiny ")
    unit = host.models.host
    eventually(lambda: unit.status("tiny").waiting == 0, "it still waits")
    gate.open.set()
    assert host.http.post(CHAT, json={"model": "tiny", **HELLO}).status_code == 200
    eventually(lambda: unit.status("tiny").leases == 0, "it is still in use")
    assert "a request failed" not in caplog.text


def test_all_who_ask_wait_for_one_load(host: HostServer, gate: Gate) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(host.url + CHAT, json={"model": "tiny", **HELLO}, timeout=30, trust_env=False))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: host.models.host.status("tiny").waiting == 4, "they do not wait")
    gate.open.set()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert gate.loads == 1


def test_a_server_that_ends_answers_what_runs_and_refuses_what_waits(
    start_host: StartHost, dummy_model: Path, other_model: Path, gate: Gate
) -> None:
    host = start_host(f"--model=tiny={dummy_model}", f"--model=other={other_model}", "--load-format", "dummy")
    gate.open.set()
    assert host.http.post(CHAT, json={"model": "other", **HELLO}).status_code == 200
    gate.open.clear()
    fields = {"model": "other", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with asked(host, CHAT, **fields) as running, asked(host, CHAT) as waiting:
        lines, comments = running.iter_lines(), waiting.iter_lines()
        assert next(lines).startswith("data: ")
        assert next(comments).startswith(": loading tiny ")
        ending = threading.Thread(target=host.stop)
        ending.start()
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert any("the server is shutting down" in line for line in comments)
        gate.open.set()
        ending.join()


def test_large_requests_that_wait_have_a_limit_together(
    host: HostServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_MOST_WAITING", 500_000)
    large = {"model": "tiny", **HELLO, "user": "x" * 300_000}
    first = threading.Thread(target=host.http.post, args=(CHAT,), kwargs={"json": large})
    first.start()
    eventually(lambda: host.models.host.status("tiny").waiting == 1, "it does not wait")
    refused = host.http.post(CHAT, json=large)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
    assert "retry-after" in refused.headers
    gate.open.set()
    first.join()
    assert host.http.post(CHAT, json=large).status_code == 200
