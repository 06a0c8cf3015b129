"""Adapters of two servers that share a store: what clients load and unload at one, the other serves and forgets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import lora_files
import pytest
from fake_hub import COMMITS, FakeHub, fake_hub
from server.conftest import ServerProcess


class Replicas(NamedTuple):
    """Two servers, their store, the adapters seed-0 to seed-2, and a hub where own/poems is seed-1."""

    one: ServerProcess
    other: ServerProcess
    store: Path
    adapters: Path
    hub: FakeHub


@pytest.fixture(scope="module")
def replicas(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    root = tmp_path_factory.mktemp("shared")
    for seed in range(3):
        lora_files.write(root / f"seed-{seed}", lora_files.tensors(seed))
    arguments = (
        *(str(dummy_model), "--load-format", "dummy", "--served-model-name", "base", "--enable-lora"),
        *("--max-cpu-loras", "4", "--kv-cache-space", "0.05", "--lora-modules", f"own={root / 'seed-0'}"),
        *("--allow-runtime-lora-updating", "--shared-store", str(root / "store")),
    )
    with fake_hub({"own/poems": lora_files.contents(root / "seed-1")}) as hub:
        environments = [hub.environment(root / f"hub-{i}") for i in range(2)]
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda environment: ServerProcess(*arguments, env=environment), environments)
        yield Replicas(one, other, root / "store", root, hub)
        one.stop()
        other.stop()


def complete(server: ServerProcess, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [*range(40, 60)], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def tokens(server: ServerProcess, model: str) -> list[int]:
    response = complete(server, model)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def update(
    server: ServerProcess, what: str, name: str, path: Path | str | None = None, **fields: Any
) -> httpx.Response:
    body = {"lora_name": name, **({} if path is None else {"lora_path": str(path)}), **fields}
    return httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=body, timeout=60)


def names(server: ServerProcess) -> list[str]:
    return [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]


def test_what_is_loaded_at_one_is_served_and_unloaded_at_the_other(replicas: Replicas) -> None:
    one, other, _, adapters, _ = replicas
    assert complete(other, "new").status_code == 404
    assert update(one, "load", "new", adapters / "seed-1").status_code == 200
    assert names(one) == names(other) == ["base", "own", "new"]
    assert httpx.get(f"{other.url}/v1/models/new").json()["parent"] == "base"
    assert tokens(other, "new") == tokens(one, "new") != tokens(one, "base")
    again = update(other, "load", "new", adapters / "seed-2")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    before = tokens(one, "new")
    assert update(other, "load", "new", adapters / "seed-2", load_inplace=True).status_code == 200
    assert tokens(one, "new") == tokens(other, "new") != before
    assert update(other, "unload", "new").status_code == 200
    assert complete(one, "new").status_code == complete(other, "new").status_code == 404
    assert names(one) == names(other) == ["base", "own"]
    assert update(one, "unload", "new").status_code == 404


def test_one_of_two_that_load_a_name_is_the_first(replicas: Replicas) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = [(replicas.one, "seed-1"), (replicas.other, "seed-2")]
        done = [*pool.map(lambda ask: update(ask[0], "load", "both", replicas.adapters / ask[1]).status_code, asked)]
    assert sorted(done) == [200, 400]
    assert tokens(replicas.one, "both") == tokens(replicas.other, "both")
    assert update(replicas.one, "unload", "both").status_code == 200


@pytest.mark.sweep
def test_each_downloads_an_adapter_of_the_hub(replicas: Replicas) -> None:
    one, other, store, adapters, hub = replicas
    assert update(one, "load", "poems", "own/poems").status_code == 200
    (entry,) = (store / "tidewheel-store" / "adapters").iterdir()
    assert json.loads(entry.read_bytes())["revision"] == COMMITS["main"]  # which the other one takes too
    assert update(one, "load", "folder", adapters / "seed-1").status_code == 200
    assert tokens(other, "poems") == tokens(one, "poems") == tokens(one, "folder")
    assert hub.sent["adapter_model.safetensors"] == 2 * len(hub.repositories["own/poems"]["adapter_model.safetensors"])
    assert update(other, "load", "poems", "own/poems").json()["error"]["param"] == "lora_name"
    for name in ("poems", "folder"):
        assert update(other, "unload", name).status_code == 200


def test_adapters_of_options_stay(replicas: Replicas) -> None:
    refused = update(replicas.one, "unload", "own")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert update(replicas.one, "load", "own", replicas.adapters / "seed-1", load_inplace=True).status_code == 400
    assert tokens(replicas.one, "own") == tokens(replicas.other, "own")


@pytest.mark.sweep
def test_what_the_other_cannot_read_is_its_requests_error(replicas: Replicas) -> None:
    one, other, store, adapters, _ = replicas
    moved = (adapters / "seed-2").rename(adapters / "moved")
    assert update(one, "load", "lost", moved).status_code == 200
    moved.rename(adapters / "seed-2")
    answer = complete(other, "lost")
    assert answer.status_code == 500
    assert "'lost' cannot be loaded" in answer.json()["error"]["message"]
    (entry,) = (store / "tidewheel-store" / "adapters").iterdir()
    entry.write_bytes(b'{"name": "lost"}')
    answer = complete(one, "lost")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "damaged_adapter")
    assert names(one) == names(other) == ["base", "own"]
    assert tokens(one, "base") == tokens(other, "base")
    assert update(other, "unload", "lost").status_code == 200
