"""Faults of one model, and models that compete for memory: the others answer, and nobody waits for ever."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import many_models
import pytest
from ports import free_port
from server.hosting.conftest import HostServer, StartHost
from server.waiting import eventually

import tidewheel
from tidewheel.engine.loading.opened_model import OpenedModel

DEMO = Path(tidewheel.__file__).with_name("server") / "demo"
SMALL = ["--max-model-len", "256", "--kv-cache-space", "0.02"]


def ask(host: HostServer, model: str, **fields: Any) -> httpx.Response:
    return host.http.post("/v1/completions", json={"model": model, "prompt": "Hello", "max_tokens": 4, **fields})


def states(host: HostServer) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in host.http.get("/v1/models").json()["data"]}


@pytest.fixture
def held_load(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loads of models named `slow` read their weights until they are given up, or until this is set."""
    goes_on = threading.Event()
    load = OpenedModel.load

    def slow_load(self: OpenedModel, options: Any, **more: Any) -> Any:
        while Path(options.model).name == "slow" and not goes_on.wait(0.01):
            more["cancellation"].check()
        return load(self, options, **more)

    monkeypatch.setattr(OpenedModel, "load", slow_load)
    return goes_on


@pytest.fixture
def slow_and_quick(dummy_model: Path, other_model: Path, tmp_path: Path) -> list[str]:
    slow = shutil.copytree(other_model, tmp_path / "slow")
    return ["--model", f"slow={slow}", "--model", f"quick={dummy_model}", "--load-format", "dummy"]


def test_others_answer_while_a_model_loads(
    start_host: StartHost, slow_and_quick: list[str], held_load: threading.Event
) -> None:
    host = start_host(*slow_and_quick)
    with ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(ask, host, "slow") for _ in range(2)]
        eventually(lambda: states(host)["slow"] == "loading", "it is not loaded")
        assert ask(host, "quick").status_code == 200
        with pytest.raises(httpx.TimeoutException):  # whose load goes on for the others
            host.http.post("/v1/completions", json={"model": "slow", "prompt": "Hello"}, timeout=0.05)
        assert not any(answer.done() for answer in waiting)
        held_load.set()
        assert [answer.result(60).status_code for answer in waiting] == [200, 200]


def test_a_server_that_ends_gives_up_what_it_loads(
    start_host: StartHost, slow_and_quick: list[str], held_load: threading.Event
) -> None:
    host = start_host(*slow_and_quick)
    with ThreadPoolExecutor(2) as clients:
        whole, streamed = (clients.submit(ask, host, "slow", stream=stream) for stream in (False, True))
        eventually(lambda: states(host)["slow"] == "loading", "it is not loaded")
        host.stop()
        assert whole.result(60).status_code == 503
        assert "shutting down" in whole.result().json()["error"]["message"]
        assert "shutting down" in streamed.result(60).text  # as an event, because the stream has begun


def test_a_broken_file_fails_for_those_who_ask_for_it_until_it_is_mended(start_host: StartHost, tmp_path: Path) -> None:
    broken = shutil.copytree(DEMO, tmp_path / "broken")
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    host = start_host("--model", f"broken={broken}", "--model", f"good={DEMO}", *SMALL)
    with ThreadPoolExecutor(3) as clients:
        failed = [answer.result(60) for answer in [clients.submit(ask, host, "broken") for _ in range(3)]]
    assert {answer.status_code for answer in failed} == {500}
    (said,) = {answer.json()["error"]["message"] for answer in failed}
    assert "'broken' cannot be loaded" in said
    assert states(host) == {"broken": "failed", "good": "unloaded"}
    assert ask(host, "good").status_code == 200
    weights.write_bytes(whole)
    assert ask(host, "broken").status_code == 200
    assert states(host) == {"broken": "loaded", "good": "loaded"}


def test_two_that_need_more_memory_than_there_is_take_turns(start_host: StartHost, tmp_path: Path) -> None:
    copy = shutil.copytree(DEMO, tmp_path / "copy")
    host = start_host("--model", f"a={DEMO}", "--model", f"b={copy}", *SMALL, "--memory", "0.07")
    with ThreadPoolExecutor(8) as clients:
        answers: list[Future[httpx.Response]] = [clients.submit(ask, host, name) for name in "abababab"]
        assert [answer.result(60).text for answer in answers if answer.result(60).status_code != 200] == []
    assert sorted(states(host).values()) == ["loaded", "unloaded"]


def test_what_can_never_fit_is_refused_with_the_numbers(start_host: StartHost) -> None:
    host = start_host("--model", f"a={DEMO}", "--model", f"b={DEMO}", *SMALL, "--memory", "0.01")
    answer = ask(host, "a")
    assert answer.status_code == 500
    assert "0.01 GiB" in answer.json()["error"]["message"]


@pytest.mark.sweep  # it takes half a minute; models that compete for memory are above
def test_models_take_turns_under_load_and_leave_nothing(
    dummy_model: Path, other_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storm = f"--port {free_port()} --seconds 3 --cases 2 --max-tokens 8 --concurrency 1 --loaded 1".split()
    models = ["--model", f"a={dummy_model}", "--model", f"b={other_model}", "--load-format", "dummy"]
    assert many_models.main([*storm, "--", *models, "--kv-cache-space", "0.01"]) == 0
    assert "a: loaded" in capsys.readouterr().out
