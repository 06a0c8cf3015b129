"""Encoders among the models of a server of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import encoder_zoo as zoo
import pytest
from server.hosting.conftest import StartHost


@pytest.mark.parametrize("folder", [zoo.native_folder, pytest.param(zoo.folder, marks=pytest.mark.sweep)])
def test_encoders_are_models_as_all_others(
    start_host: StartHost, dummy_model: Path, folder: Callable[[str], Path]
) -> None:
    host = start_host(f"--model=chat={dummy_model}", f"--model=encoder={folder('bert')}", "--max-loaded-models", "1")
    answer = host.http.post("/v1/embeddings", json={"model": "encoder", "input": "high tide"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "encoder"
    assert host.http.get("/health").json()["ready"] == ["encoder"]
    body = {"model": "encoder", "messages": [{"role": "user", "content": "Hello"}]}
    refused = host.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_chat_model")
    assert host.http.get("/server_info?model=encoder").json()["model"] == "encoder"
    # TEI's requests name no model, and the default is one that generates.
    assert host.http.post("/embed", json={"inputs": ["high tide"]}).json() == [answer.json()["data"][0]["embedding"]]
    assert host.http.get("/health").json()["ready"] == ["encoder"]
