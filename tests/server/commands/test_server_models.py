"""`tidewheel run`, `ps` and `stop` against a server that runs."""

from __future__ import annotations

import json

import pytest
from server.conftest import RunningServer

from tidewheel.server.commands.cli import main


def test_a_server_of_one_model(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["--url", server.url]
    assert main(["run", "scripted", "SAY(hi", "there)YAS", *at]) == 0
    assert capsys.readouterr().out == "hi there\n"
    assert main(["ps", *at]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STATE", "SIZE", "CONTEXT", "UNTIL"]
    assert row.split() == ["scripted", "loaded", "-", "8192", "for", "ever"]
    assert main(["ps", "--json", *at]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["state"], model["context"]) == ("scripted", "loaded", 8192)
    assert main(["stop", "scripted", *at]) == 1
    assert "this one has one model, which stays loaded" in capsys.readouterr().err
    assert main(["run", "own/other", "hi", *at]) == 1
    assert "/api/pull is not supported" in capsys.readouterr().err


def test_without_a_server(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ps"], ["stop", "model"], ["run", "model", "hi"]):
        assert main([*command, "--url", f"http://127.0.0.1:{unused_port}"]) == 1
        assert "is a server running there?" in capsys.readouterr().err


def test_one_model_does_not_sleep(server: RunningServer) -> None:
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    for path in ("/sleep", "/wake_up", "/models/load", "/models/unload"):
        refused = server.http.post(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_endpoint")
        assert "--model NAME=MODEL" in refused.json()["error"]["message"]
