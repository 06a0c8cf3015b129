"""Several models with options of their own: presets and adapters; and what spans all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import lora_files
import pytest
import yaml
from server.hosting.conftest import HostServer, StartHost
from server.waiting import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def host(
    start_host: StartHost, dummy_model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> HostServer:
    folder = tmp_path_factory.mktemp("several")
    lora_files.write(folder / "poems", lora_files.tensors(1))
    lora_files.write(folder / "rhymes", lora_files.tensors(2))
    models = {
        "long": {"model": str(dummy_model), "load-format": "dummy", "aliases": ["default"]},
        "short": {"model": str(dummy_model), "load-format": "dummy", "max-model-len": 64},
        "adapted": {
            "model": str(other_model),
            "load-format": "dummy",
            "enable-lora": True,
            "allow-runtime-lora-updating": True,
            "lora-modules": [f"poems={folder / 'poems'}"],
        },
    }
    (folder / "options.yaml").write_text(yaml.safe_dump({"models": models, "batch-dir": str(folder / "batches")}))
    return start_host("--config", str(folder / "options.yaml"), "--admin-api-key", "boss")


def post(host: HostServer, path: str, **body: Any) -> httpx.Response:
    return host.http.post(path, json=body, headers=KEY)


def complete(host: HostServer, model: str, prompt: str = "high tide", **fields: Any) -> Any:
    answer = post(host, COMPLETIONS, **{"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_names_of_the_same_file_share_one_engine_and_keep_their_contexts(host: HostServer) -> None:
    assert complete(host, "long")["choices"] == complete(host, "short")["choices"]
    assert len([*host.models.loaded]) == 1
    cards = {card["id"]: card for card in host.http.get("/v1/models", headers=KEY).json()["data"]}
    assert (cards["long"]["max_model_len"], cards["default"]["max_model_len"]) == (512, 512)
    assert cards["short"]["max_model_len"] == 64
    assert complete(host, "short", "x" * 50, max_tokens=None, ignore_eos=True)["usage"]["total_tokens"] == 64
    assert complete(host, "default", "x" * 50, max_tokens=100, ignore_eos=True)["usage"]["total_tokens"] == 150
    refused = post(host, COMPLETIONS, model="short", prompt="x" * 64, max_tokens=1)
    assert refused.status_code == 400
    assert "64" in refused.json()["error"]["message"]


def test_what_an_engine_has_done_counts_once(host: HostServer) -> None:
    complete(host, "long")
    complete(host, "short")
    lines = host.http.get("/metrics").text.splitlines()
    assert [line for line in lines if line.startswith("tidewheel:generation_tokens_total{") and '"short"' in line] == []
    for name in ("long", "short"):
        assert any(
            line.startswith(f'tidewheel:request_success_total{{finished_reason="length",model_name="{name}"}}')
            for line in lines
        )


def test_a_request_finds_a_model_by_its_adapter(host: HostServer, tmp_path: Path) -> None:
    plain = complete(host, "adapted")
    poems = complete(host, "poems")
    assert poems["model"] == "poems"
    assert poems["choices"][0]["text"] != plain["choices"][0]["text"]
    names = {card["id"]: card["parent"] for card in host.http.get("/v1/models", headers=KEY).json()["data"]}
    assert names["poems"] == "adapted"

    lora_files.write(tmp_path / "new", lora_files.tensors(3))
    loading = {"lora_name": "new", "lora_path": str(tmp_path / "new")}
    taken = post(host, "/v1/load_lora_adapter?model=adapted", **{**loading, "lora_name": "long"})
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    assert post(host, "/v1/load_lora_adapter?model=adapted", **loading).status_code == 200
    assert complete(host, "new")["model"] == "new"
    assert post(host, "/v1/unload_lora_adapter", lora_name="new").status_code == 200
    assert post(host, COMPLETIONS, model="new", prompt="x").status_code == 404


def test_a_batch_has_requests_for_several_models(host: HostServer) -> None:
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": COMPLETIONS,
            "body": {"model": name, "prompt": "x", "max_tokens": 2},
        }
        for name in ("long", "adapted", "none")
    ]
    content = b"\n".join(json.dumps(row).encode() for row in rows)
    form = {"files": {"file": ("rows.jsonl", content)}, "data": {"purpose": "batch"}}
    file = host.http.post("/v1/files", headers=KEY, **form).json()
    batch = post(host, "/v1/batches", input_file_id=file["id"], endpoint=COMPLETIONS, completion_window="24h").json()

    def look() -> Any:
        return host.http.get(f"/v1/batches/{batch['id']}", headers=KEY).json()

    eventually(lambda: look()["status"] == "completed", "it never ended")
    ended = look()
    assert (ended["request_counts"]["completed"], ended["request_counts"]["failed"]) == (2, 1)
    output = host.http.get(f"/v1/files/{ended['output_file_id']}/content", headers=KEY).text
    answers = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, output.splitlines())}
    assert answers == {"long": "long", "adapted": "adapted"}


def test_a_conversation_goes_on_with_another_model(host: HostServer) -> None:
    first = post(host, "/v1/responses", model="long", input="high tide", max_output_tokens=2).json()
    more = {"previous_response_id": first["id"], "input": "and?", "max_output_tokens": 2}
    second = post(host, "/v1/responses", model="adapted", **more)
    assert second.status_code == 200, second.text
    assert host.http.get(f"/v1/responses/{second.json()['id']}", headers=KEY).json()["model"] == "adapted"


def test_a_response_in_the_background_keeps_its_model(host: HostServer) -> None:
    body = {"model": "long", "input": "x", "background": True, "max_output_tokens": 400, "ignore_eos": True}
    made = post(host, "/v1/responses", **body).json()
    assert made["status"] in ("queued", "in_progress")
    assert host.models.host.status("long").leases == 1

    def status() -> str:
        return str(host.http.get(f"/v1/responses/{made['id']}", headers=KEY).json()["status"])

    eventually(lambda: status() not in ("queued", "in_progress"), "it never ended")
    assert status() in ("completed", "incomplete")
    eventually(lambda: host.models.host.status("long").leases == 0, "it is still in use")


def test_a_model_that_fails_is_alone_and_comes_back(host: HostServer) -> None:
    complete(host, "long")
    complete(host, "adapted")
    loaded = host.models.unit(host.models.catalog.find("adapted")).loaded
    assert loaded is not None
    assert loaded.engines.chat is not None

    def fail() -> None:
        raise RuntimeError("a test's failure")

    loaded.engines.chat.call(fail)
    eventually(lambda: host.models.status(host.models.catalog.find("adapted")).error is not None, "it lives on")
    assert host.http.get("/v1/models/adapted", headers=KEY).json()["status"]["value"] == "failed"
    assert host.http.get("/health").status_code == 200
    assert complete(host, "long")
    assert complete(host, "adapted")
