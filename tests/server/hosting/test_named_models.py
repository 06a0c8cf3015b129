"""Models of a file and of a folder behind one address: their names, presets, adapters, and those that are broken."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import lora_files
import pytest
from cores import one_core
from server.conftest import ServerProcess
from server.hosting.conftest import HostServer, StartHost


@pytest.fixture(scope="module")
def host(start_host: StartHost, dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> HostServer:
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(dummy_model, folder / "models" / "owner" / "name")
    (folder / "models" / "owner" / "name" / "model.safetensors").touch()
    (folder / "models" / "broken.gguf").write_text("not a model")
    adapter = lora_files.write(folder / "poems", lora_files.tensors())
    (folder / "options.yaml").write_text(f"""\
load-format: dummy
kv-cache-space: 0.05
models-dir: {folder}/models
models:
  chat:
    model: &file {dummy_model}
    max-model-len: 64
    enable-lora: true
    lora-modules: ["poems={adapter}"]
  precise:
    model: *file
    aliases: [exact]
    max-model-len: 256
    enable-lora: true
    lora-modules: ["poems={adapter}"]
    override-generation-config: {{temperature: 0}}
""")
    return start_host("--config", str(folder / "options.yaml"))


def complete(host: HostServer, model: str, **fields: Any) -> httpx.Response:
    return host.http.post("/v1/completions", json={"model": model, "prompt": [40, 41, 42], "max_tokens": 4, **fields})


def cards(host: HostServer) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in host.http.get("/v1/models").json()["data"]}


def test_presets_are_loaded_together_and_each_keeps_its_own_options(host: HostServer) -> None:
    assert complete(host, "exact").json()["model"] == "precise"
    listed = cards(host)
    assert {name: listed[name]["status"]["value"] for name in ("chat", "precise", "exact", "owner/name")} == {
        "chat": "loaded",
        "precise": "loaded",
        "exact": "loaded",
        "owner/name": "unloaded",
    }
    assert (listed["chat"]["max_model_len"], listed["exact"]["max_model_len"]) == (64, 256)
    greedy = [complete(host, "precise", seed=seed).json()["choices"][0]["text"] for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    too_long = complete(host, "chat", prompt=[40] * 100)
    assert too_long.status_code == 400
    assert "64" in too_long.json()["error"]["message"]
    assert complete(host, "precise", prompt=[40] * 100).status_code == 200


def test_an_adapter_is_found_by_its_name(host: HostServer) -> None:
    base, poems = (complete(host, name, temperature=0).json() for name in ("chat", "poems"))
    assert poems["model"] == "poems"
    assert poems["choices"] != base["choices"]


def test_what_is_in_the_folder_is_served_or_listed_with_its_error(host: HostServer) -> None:
    assert complete(host, "owner/name").json()["model"] == "owner/name"
    status = cards(host)["broken"]["status"]
    assert (status["value"], status["error"]) == (
        "failed",
        "broken.gguf is no GGUF file, or a broken one: download it again",
    )
    broken = complete(host, "broken")
    assert broken.status_code == 500
    assert "broken.gguf is no GGUF file" in broken.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/nam", "did you mean owner/name?"),
        ("../models/owner/name", "did you mean owner/name?"),
        ("/etc/passwd", "served: chat, precise, broken, owner/name"),
        ("a\x00b", "served: chat"),
        ("x" * 100_000, "served: chat"),
    ],
)
def test_a_name_that_is_not_served_is_a_404_that_tells_near_ones(host: HostServer, name: str, said: str) -> None:
    answer = complete(host, name)
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]
    assert len(answer.content) < 1500


def test_the_command_serves_a_folder_and_ends_with_nothing_left(dummy_model: Path, tmp_path: Path) -> None:
    shutil.copytree(dummy_model, tmp_path / "tide")
    (tmp_path / "tide" / "model.safetensors").touch()
    arguments = ["--models-dir", str(tmp_path), "--load-format", "dummy", "--threads-bind", one_core()]
    process = ServerProcess(*arguments, "--kv-cache-space", "0.05")
    try:
        body = {"model": "tide", "prompt": [40, 41], "max_tokens": 2}
        assert httpx.post(f"{process.url}/v1/completions", json=body, trust_env=False).status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0
    finally:
        process.stop()
    assert f"Serving tide on {process.url}" in process.log
    assert "nanobind" not in process.log
