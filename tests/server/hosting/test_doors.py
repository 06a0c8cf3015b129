"""The endpoints that load, unload, download and delete models, as clients of llama.cpp, Ollama and vLLM use them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from fake_hub import Claimed, FakeHub, fake_hub
from server.hosting.conftest import HostServer, StartHost

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.commands import server_models
from tidewheel.server.commands.chat import command
from tidewheel.server.commands.cli import main

KEYS = ("--api-key", "plain", "--admin-api-key", "secret")


@pytest.fixture(scope="module")
def hub(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """own/model and own/other can be served with dummy weights; the processes of downloads find this hub."""
    files = {path.name: path.read_bytes() for path in dummy_model.iterdir()} | {"model.safetensors": b"weights" * 9999}
    huge = {**files, "model.safetensors": Claimed(b"weights")}
    repositories = {"own/model": files, "own/other": files, "own/huge": huge}
    with fake_hub(repositories) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment(tmp_path_factory.mktemp("home")).items():
            patch.setenv(name, value)
        patch.delenv("HF_TOKEN", raising=False)
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def host(start_host: StartHost, dummy_model: Path, folder: Path, hub: FakeHub) -> HostServer:
    """Two names of one model, in two units; more can be downloaded."""
    return start_host(
        *("--model", f"one={dummy_model}", "--model", f"two={dummy_model}", "--load-format", "dummy"),
        *("--models-dir", str(folder), "--allow-model-management", "--seed", "1"),
    )


@pytest.fixture
def client(host: HostServer) -> ollama.Client:
    return ollama.Client(host.url)


def states(host: HostServer) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in host.http.get("/models").json()["data"]}


def soon(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def events(host: HostServer) -> Iterator[list[dict[str, Any]]]:
    """The events from now on."""
    heard: list[dict[str, Any]] = []
    listening = threading.Event()
    with httpx.Client(base_url=host.url, trust_env=False) as http:

        def listen() -> None:
            with contextlib.suppress(httpx.HTTPError), http.stream("GET", "/models/sse", timeout=60) as stream:
                for line in stream.iter_lines():
                    listening.set()
                    if line.startswith("data: "):
                        heard.append(json.loads(line.removeprefix("data: ")))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        assert listening.wait(30)
        yield heard


def test_a_model_is_loaded_and_unloaded(host: HostServer) -> None:
    with events(host) as heard:
        assert host.http.post("/models/load", json={"model": "one"}).json() == {"success": True}
        soon(lambda: states(host)["one"] == "loaded")
        (card,) = (model for model in host.http.get("/models").json()["data"] if model["id"] == "one")
        assert card["memory_bytes"] > 0
        assert card["architecture"]["output_modalities"] == ["text"]
        assert host.http.post("/models/unload", json={"model": "one"}).json() == {"success": True}
        assert states(host)["one"] == "unloaded"
        soon(lambda: heard and heard[-1]["data"].get("status") == "unloaded")
    of_one = [event["data"] for event in heard if event["model"] == "one"]
    changes = [data["status"] for data in of_one if "progress" not in data]
    assert (changes[0], changes[-1], "loaded" in changes) == ("loading", "unloaded", True)
    progress = [data["progress"]["value"] for data in of_one if "progress" in data]
    assert progress == sorted(progress)
    unknown = host.http.post("/models/load", json={"model": "onee"})
    assert (unknown.status_code, "did you mean one" in unknown.text) == (404, True)
    assert host.http.get("/props").json()["role"] == "router"


def test_keep_alive(host: HostServer, client: ollama.Client) -> None:
    def expires_in() -> float:
        (model,) = (model for model in client.ps().models if model.name == "one:latest")
        assert model.expires_at is not None
        return (model.expires_at - datetime.now(timezone.utc)).total_seconds()

    assert client.generate("one", keep_alive="1h30m").done_reason == "load"
    assert 5300 < expires_in() <= 5400
    said = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert host.http.post("/v1/chat/completions", json={**said, "keep_alive": 120}).status_code == 200
    assert 100 < expires_in() <= 120
    assert client.generate("one", keep_alive=-1).done_reason == "load"
    assert expires_in() > 1e9
    assert client.chat("one", [], keep_alive=0).done_reason == "unload"
    soon(lambda: client.ps().models == [])
    assert client.generate("one", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []  # it was not loaded for that
    client.chat("one", [{"role": "user", "content": "hi"}], keep_alive=0, options={"num_predict": 1})
    soon(lambda: client.ps().models == [])
    for wrong in ("soon", "5 m", "", True, [1], "9" * 99):
        refused = host.http.post("/api/generate", json={"model": "one", "keep_alive": wrong})
        assert (refused.status_code, "keep_alive must be" in refused.text) == (400, True), wrong


def test_models_sleep_and_wake_up(host: HostServer) -> None:
    http = host.http
    http.post("/api/generate", json={"model": "one"})
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep?level=1").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert states(host)["one"] == "loaded"
    assert http.post("/sleep?level=2&model=one").status_code == 200
    assert http.get("/is_sleeping?model=one").json() == {"is_sleeping": True}
    for wrong in ("/sleep?level=0", "/sleep?mode=abort", "/wake_up?tags=gold"):
        assert http.post(wrong).status_code == 400


def test_a_model_is_pulled_used_copied_and_deleted(host: HostServer, client: ollama.Client, folder: Path) -> None:
    lines = list(client.pull("hf.co/own/model:latest", stream=True))
    assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
    completed = [line.completed or 0 for line in lines if line.digest]
    assert completed == sorted(completed)
    assert completed[-1] == lines[-2].total
    assert "own/model:latest" in {model.model for model in client.list().models}
    shown = client.show("own/model")
    assert (shown.capabilities, shown.modelinfo["llama.context_length"]) == (["completion"], 512)
    client.copy("own/model", "mine")
    asked = client.generate("mine", "hi", options={"num_predict": 1})
    assert (asked.model, asked.eval_count) == ("mine", 1)
    assert client.pull("own/model").status == "success"  # nothing is new
    assert states(host)["mine"] == states(host)["own/model"] == "loaded"  # they share their weights
    client.copy("mine", "ours")  # of what is loaded
    assert client.generate("ours", "hi", options={"num_predict": 1}).model == "ours"
    client.delete("mine")
    assert {*states(host)} == {"one", "two", "own/model", "ours"}
    client.delete("own/model")
    assert {*states(host)} == {"one", "two"}
    assert [path for path in folder.rglob("*") if path.is_file() and path.suffix == ".safetensors"] == []
    for name, why in {"one": "its operator", "own/model": "not served", "../one": "not served"}.items():
        with pytest.raises(ollama.ResponseError, match=why):
            client.delete(name)


def test_what_cannot_be_pulled_or_copied(host: HostServer, client: ollama.Client) -> None:
    for name in ("llama3.2", "../own/model", "own/../model", "-rf/model", "own/model:-x", "own/model\n", "x" * 999):
        with pytest.raises(ollama.ResponseError, match="is no model of the hub") as refused:
            client.pull(name)
        assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match=r"the disk of .* has .* GiB free"):
        list(client.pull("own/huge", stream=True))
    for name, why in {"two": "names a model already", "../x": "must not look like a path", "a\nb": "shown"}.items():
        with pytest.raises(ollama.ResponseError, match=why):
            client.copy("one", name)
    with pytest.raises(ollama.ResponseError, match="models are not created"):
        client.create("new", from_="one")


def test_a_cancelled_pull_leaves_nothing_begun(host: HostServer, hub: FakeHub, folder: Path) -> None:
    def begun() -> list[Path]:
        return [*folder.rglob("*.incomplete")]

    hub.may_send.clear()
    try:
        with host.http.stream("POST", "/api/pull", json={"model": "own/other"}) as stream:
            lines = stream.iter_lines()  # which would close the stream without a name
            assert json.loads(next(lines))["status"] == "pulling manifest"
            assert states(host)["own/other"] == "downloading"
            soon(begun)
        soon(lambda: "own/other" not in states(host))
        assert begun() == []
        with events(host) as heard:
            assert host.http.post("/models", json={"model": "own/other"}).json() == {"success": True}
            soon(begun)
            assert host.http.post("/models/unload", json={"model": "own/other"}).json() == {"success": True}
            soon(lambda: heard)
        assert (heard[-1]["event"], "was cancelled" in heard[-1]["data"]["error"]) == ("download_failed", True)
        assert begun() == []
    finally:
        hub.may_send.set()


def test_the_commands(host: HostServer, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", host.url]
    assert main(["run", "own/other", "hi", *at]) == 0  # which downloads it
    assert capsys.readouterr().out.strip()
    assert main(["ps", *at]) == 0
    assert "own/other" in capsys.readouterr().out
    assert main(["stop", "own/other", *at]) == 0
    assert capsys.readouterr().out == "Unloaded own/other\n"
    assert main(["ps", "--all", "--json", *at]) == 0
    found = {model["name"]: model["state"] for model in json.loads(capsys.readouterr().out)}
    assert found == {"one": "unloaded", "two": "unloaded", "own/other": "unloaded"}


def test_the_commands_need_no_address_for_a_server_at_the_usual_one(
    host: HostServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (command, server_models):
        monkeypatch.setattr(module, "DEFAULT_URL", host.url)
    assert main(["run", "one", "hi"]) == 0
    assert main(["ps"]) == 0
    assert "one" in capsys.readouterr().out
    assert main(["stop", "one"]) == 0


def test_who_may_change_the_models(start_host: StartHost, dummy_model: Path, tmp_path: Path) -> None:
    arguments = ("--model", f"one={dummy_model}", "--model", f"two={dummy_model}", "--load-format", "dummy")
    managed = ("--models-dir", str(tmp_path), "--allow-model-management")
    for keys in (("--api-key", "plain"), ("--host", "0.0.0.0")):
        with pytest.raises(TidewheelError, match="--admin-api-key"):
            start_host(*arguments, *managed, *keys)
    keyed = start_host(*arguments, *managed, *KEYS)
    changes: list[tuple[str, str, dict[str, str]]] = [
        ("POST", "/api/pull", {"model": "own/model"}),
        ("DELETE", "/api/delete", {"model": "one"}),
        ("POST", "/api/copy", {"source": "one", "destination": "three"}),
        ("POST", "/models", {"model": "own/model"}),
        ("DELETE", "/models?model=one", {}),
        ("POST", "/models/unload", {"model": "one"}),
        ("POST", "/sleep", {}),
        ("GET", "/models?reload=1", {}),
    ]
    for method, path, body in changes:
        asked = keyed.http.request(method, path, json=body, headers={"authorization": "Bearer plain"})
        assert (asked.status_code, "right admin" in asked.text) == (403, True), path
    copied = keyed.http.post("/api/copy", json=changes[2][2], headers={"authorization": "Bearer secret"})
    assert copied.status_code == 200
    fixed = start_host(*arguments)
    for method, path, body in changes[:5]:
        refused = fixed.http.request(method, path, json=body)
        assert (refused.status_code, "--allow-model-management" in refused.text) == (403, True), path
