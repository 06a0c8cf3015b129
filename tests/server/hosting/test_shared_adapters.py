"""Adapters that clients load at one of two servers of several models that share a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import lora_files
import pytest
import yaml
from server.hosting.conftest import HostServer, StartHost
from server.waiting import eventually


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        lora_files.write(folder / f"seed-{seed}", lora_files.tensors(seed))
    return folder


@pytest.fixture(scope="module")
def servers(
    start_host: StartHost, dummy_model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HostServer, HostServer]:
    """Two, each with the models plain and adapted, and with short, which is adapted with a shorter context."""
    folder = tmp_path_factory.mktemp("shared")
    changing = {"enable-lora": True, "allow-runtime-lora-updating": True}
    models = {
        "plain": {"model": str(dummy_model), **changing},
        "adapted": {"model": str(other_model), **changing},
        "short": {"model": str(other_model), "max-model-len": 64, **changing},
    }
    options = {"models": models, "load-format": "dummy", "shared-store": str(folder / "store"), "kv-cache-space": 0.01}
    (folder / "options.yaml").write_text(yaml.safe_dump(options))
    one, other = (start_host("--config", str(folder / "options.yaml")) for _ in range(2))
    return one, other


def complete(host: HostServer, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "high tide", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return host.http.post("/v1/completions", json=body)


def tokens(host: HostServer, model: str) -> Any:
    answer = complete(host, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def load(host: HostServer, name: str, path: Path, model: str, **fields: Any) -> httpx.Response:
    return host.http.post(
        f"/v1/load_lora_adapter?model={model}", json={"lora_name": name, "lora_path": str(path), **fields}
    )


def test_both_serve_it_until_it_is_unloaded(servers: tuple[HostServer, HostServer], adapters: Path) -> None:
    one, other = servers
    assert complete(other, "new").status_code == 404
    assert load(one, "new", adapters / "seed-1", "adapted").status_code == 200
    with_adapter = tokens(one, "new")
    assert with_adapter != tokens(one, "adapted")
    assert tokens(other, "new") == with_adapter
    assert other.http.get("/v1/models/new").json()["parent"] == "adapted"

    assert other.http.post("/models/unload", json={"model": "adapted"}).status_code == 200
    eventually(lambda: "adapted" not in other.http.get("/health").json()["ready"], "it is still loaded")
    assert tokens(other, "new") == with_adapter
    for name in ("adapted", "plain"):
        taken = load(other, name, adapters / "seed-2", "adapted")
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name"), taken.text
    of_another = load(other, "new", adapters / "seed-2", "plain", load_inplace=True)
    assert (of_another.status_code, "of another model" in of_another.text) == (400, True)
    assert load(other, "new", adapters / "seed-2", "short", load_inplace=True).status_code == 200
    assert tokens(one, "new") == tokens(other, "new") != with_adapter
    assert other.http.get("/v1/models/new").json()["parent"] == "short"

    unloading = {"lora_name": "new"}
    assert one.http.post("/v1/unload_lora_adapter?model=plain", json=unloading).status_code == 404
    assert other.http.post("/v1/unload_lora_adapter", json=unloading).status_code == 200
    for host in servers:
        assert complete(host, "new").status_code == 404
    assert load(one, "new", adapters / "seed-1", "plain").status_code == 200
    assert tokens(other, "new") == tokens(one, "new")
    assert other.http.get("/v1/models/new").json()["parent"] == "plain"
