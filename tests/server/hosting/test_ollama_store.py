"""`--models-dir` is the folder in which Ollama keeps its own models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from server.hosting.conftest import StartHost

from tidewheel.server.hosting.catalog import Catalog
from tidewheel.server.hosting.folder_watch import watch_folder
from tidewheel.server.options.serve import parse_options

LIBRARY = "registry.ollama.ai/library"
GGUF = b"GGUF of a model"


class Store:
    """Ollama's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, content: bytes) -> str:
        """Its digest."""
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs" / f"sha256-{digest}").write_bytes(content)
        return f"sha256:{digest}"

    def path(self, content: bytes) -> str:
        return str(self.folder / "blobs" / self.blob(content).replace(":", "-"))

    def manifest(self, **layers: bytes) -> dict[str, Any]:
        """A model's, by the last part of its layers' types."""
        found = [
            {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": self.blob(content), "size": len(content)}
            for kind, content in layers.items()
        ]
        config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": self.blob(b"{}"), "size": 2}
        return {"schemaVersion": 2, "config": config, "layers": found}

    def add(self, name: str, manifest: object, folder: str = "manifests") -> Path:
        path = self.folder / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest))
        return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def catalog(store: Store, *arguments: str) -> Catalog:
    return Catalog(parse_options(["--models-dir", str(store.folder), *arguments], {}))


def found(store: Store, *arguments: str) -> Mapping[str, Any]:
    """Where each model is, or what is wrong with it."""
    return {entry.name: entry.error or entry.where for entry in catalog(store, *arguments).entries}


def test_models_have_the_names_that_ollama_shows(store: Store) -> None:
    plain = store.manifest(model=GGUF, template=b"{{ .Prompt }}", license=b"free")
    other = store.manifest(model=GGUF + b" 2")
    for name in (
        f"{LIBRARY}/llama3.2/latest",
        f"{LIBRARY}/llama3.2/1b",
        "registry.ollama.ai/someone/model/latest",
        "hf.co/owner/name-GGUF/Q4_K_M",
    ):
        store.add(name, plain)
    # Newer versions of Ollama keep manifests among the blobs, and link to them.
    kept = store.path(json.dumps(other).encode())
    link = store.folder / "manifests-v2" / LIBRARY / "llama3.2" / "1b"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(kept, link.parent))
    of_many = [
        {"runner": "mlx", "digest": "sha256:" + "0" * 64},
        {"runner": "llamacpp", **plain},
        {"runner": "Ollama", "digest": store.blob(json.dumps(other).encode())},
    ]
    store.add(f"{LIBRARY}/listed/latest", {"mediaType": "a list", "manifests": of_many}, "manifests-v2")
    (store.folder / "beside.gguf").write_bytes(GGUF)
    assert found(store) == {
        "beside": str(store.folder / "beside.gguf"),
        "hf.co/owner/name-GGUF:Q4_K_M": store.path(GGUF),
        "listed": store.path(GGUF + b" 2"),
        "llama3.2": store.path(GGUF),
        "llama3.2:1b": store.path(GGUF + b" 2"),
        "someone/model": store.path(GGUF),
    }
    assert catalog(store).find("llama3.2:latest").name == "llama3.2"


def test_projectors_and_parameters_are_taken_and_what_is_not_used_is_told(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = json.dumps({"temperature": 0.5, "repeat_penalty": 1.1, "stop": ["x"], "num_ctx": 9}).encode()
    files = {"projector": b"GGUF of a projector", "params": parameters, "system": b"Rhyme.", "messages": b"[]"}
    store.add(f"{LIBRARY}/sees/latest", store.manifest(model=GGUF, **files))
    with caplog.at_level(logging.WARNING):
        models = catalog(store)
        asyncio.run(models.rescan())
    assert caplog.messages == ["sees: what Ollama has as its system and messages is not used"]
    options = models.find("sees").options
    assert options.engine.media.mmproj == store.path(b"GGUF of a projector")
    assert options.app.override_generation_config == {"temperature": 0.5, "repetition_penalty": 1.1}
    given = catalog(store, "--override-generation-config", '{"top_k": 1}').find("sees").options
    assert given.app.override_generation_config == {"top_k": 1}


def test_what_cannot_be_served_says_why(store: Store, tmp_path: Path) -> None:
    good = store.manifest(model=GGUF)
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(GGUF)
    (store.folder / "blobs" / f"sha256-{'a' * 64}").symlink_to(outside)
    layer = {"mediaType": "application/vnd.ollama.image.model"}
    wrong = {
        "adapted": (store.manifest(model=GGUF, adapter=b"GGUF"), "it has an adapter"),
        "cloud": (store.manifest(license=b"none"), "it has no GGUF file"),
        "twice": ({"layers": good["layers"] * 2}, "several GGUF files"),
        "text": (store.manifest(model=b"no GGUF"), "is no GGUF file"),
        "gone": ({"layers": [{**layer, "digest": "sha256:" + "b" * 64}]}, "does not exist"),
        "away": ({"layers": [{**layer, "digest": "sha256:" + "a" * 64}]}, "leads out of the folder"),
        "path": ({"layers": [{**layer, "digest": "../../outside.gguf"}]}, "in the place of a digest"),
        "list": ({"manifests": [{"runner": "mlx", "digest": "x"}]}, "no model in GGUF files"),
        "broken": ([1], "is no manifest of Ollama"),
        "huge": (" " * (1 << 20), "may have at most"),
        "params": (store.manifest(model=GGUF, params=b"[1]"), "is not a JSON object"),
    }
    for name, (manifest, _) in wrong.items():
        store.add(f"{LIBRARY}/{name}/latest", manifest)
    elsewhere = store.add(f"{LIBRARY}/link/latest", good)
    shutil.move(elsewhere, tmp_path / "manifest")
    elsewhere.symlink_to(tmp_path / "manifest")
    store.add(f"{LIBRARY}/good/latest", good)
    models = found(store)
    for name, (_, why) in wrong.items():
        assert why in models[name], name
    assert "leads out of the folder" in models["link"]
    assert models["good"] == store.path(GGUF)
    assert not any(str(tmp_path) in error for name, error in models.items() if name != "good")


def test_pulls_of_ollama_are_noticed(store: Store) -> None:
    store.add(f"{LIBRARY}/first/latest", store.manifest(model=GGUF))
    models = catalog(store)

    async def follow() -> None:
        watching = asyncio.create_task(watch_folder(str(store.folder), models.rescan, 0.005))
        for number in range(1000):  # the first ones may be there before it looks for the first time
            store.add(f"{LIBRARY}/first/{number}", store.manifest(model=GGUF))
            await asyncio.sleep(0.02)
            if len(models.entries) > 1:
                break
        watching.cancel()

    asyncio.run(follow())
    assert [entry.name for entry in models.entries][:2] == ["first", "first:0"]


def test_its_models_answer(start_host: StartHost, store: Store, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        model = tiny_gguf.write(tmp_path / f"{name}.gguf", seed).read_bytes()
        store.add(f"{LIBRARY}/{name}/latest", store.manifest(model=model, params=b'{"temperature": 0}'))
    host = start_host("--models-dir", str(store.folder))
    asked = {"messages": [{"role": "user", "content": "high tide"}], "stream": False, "options": {"num_predict": 8}}
    answers = [host.http.post("/api/chat", json={"model": name, **asked}) for name in ("one:latest", "two", "one")]
    assert [answer.status_code for answer in answers] == [200, 200, 200], answers[0].text
    texts = [answer.json()["message"]["content"] for answer in answers]
    assert texts[0] == texts[2] != texts[1]
    assert [model["name"] for model in host.http.get("/api/tags").json()["models"]] == ["one:latest", "two:latest"]
    shown = host.http.post("/api/show", json={"model": "two"}).json()
    assert shown["details"]["format"] == "gguf"
