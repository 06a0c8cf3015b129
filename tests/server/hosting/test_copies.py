"""Copies of models: they are there after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.hosting.conftest import HostServer, StartHost

from tidewheel.engine.errors import ModelError

FILE = ".tidewheel-copies.json"


@pytest.fixture
def folder(dummy_model: Path, tmp_path: Path) -> Path:
    for name in ("a", "b"):
        shutil.copytree(dummy_model, tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"not read")
    return tmp_path


def start(start_host: StartHost, folder: Path) -> HostServer:
    return start_host("--models-dir", str(folder), "--load-format", "dummy", "--allow-model-management")


def copy(host: HostServer, source: str, name: str) -> httpx.Response:
    return host.http.post("/api/copy", json={"source": source, "destination": name})


def names(host: HostServer) -> list[str]:
    return [card["id"] for card in host.http.get("/v1/models").json()["data"]]


def model_of(host: HostServer, **body: Any) -> str:
    answer = host.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


def test_a_copy_is_served_after_a_restart_until_it_is_deleted(start_host: StartHost, folder: Path) -> None:
    first = start(start_host, folder)
    assert model_of(first, model="b") == "b"
    for source, name in (("b", "mine"), ("mine", "ours"), ("a", "theirs")):
        assert copy(first, source, name).status_code == 200
    assert names(first) == ["a", "b", "mine", "ours", "theirs"]
    assert [status.leases for status in first.models.host.snapshot() if status.loaded_at is not None] == [0]
    shutil.move(folder / "a", folder / ".away")
    second = start(start_host, folder)
    assert names(second) == ["b", "mine", "ours"]
    assert (model_of(second), model_of(second, model="ours")) == ("b", "ours")
    assert len([*second.models.loaded]) == 1, "they share their weights"
    assert second.http.request("DELETE", "/api/delete", json={"model": "mine"}).status_code == 200
    assert copy(second, "ours", "late").status_code == 200
    shutil.move(folder / ".away", folder / "a")
    assert names(start(start_host, folder)) == ["a", "b", "ours", "theirs", "late"]


def test_a_copy_that_cannot_be_kept_is_not_made(start_host: StartHost, folder: Path) -> None:
    host = start(start_host, folder)
    (folder / FILE).write_text('{"copies": 5}')
    refused = copy(host, "a", "mine")
    assert (refused.status_code, "mend it, or delete it" in refused.text) == (500, True)
    assert names(host) == ["a", "b"]
    with pytest.raises(ModelError, match=r"tidewheel-copies\.json, which has the copies of models, is broken"):
        start(start_host, folder)
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    assert copy(host, "a", "mine").status_code == 500
    assert names(host) == ["a", "b"]
