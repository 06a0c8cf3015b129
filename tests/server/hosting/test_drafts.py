"""A model with a draft model of its own, beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from server.hosting.conftest import HostServer, StartHost
from server.waiting import eventually


@pytest.fixture(scope="module")
def host(
    start_host: StartHost, dummy_model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> HostServer:
    drafts = {"method": "draft_model", "model": str(other_model), "num_speculative_tokens": 3}
    models = {
        "plain": str(dummy_model),
        "drafted": {"model": str(dummy_model), "speculative-config": drafts},
        "other": str(other_model),
    }
    file = tmp_path_factory.mktemp("drafts") / "options.yaml"
    file.write_text(yaml.safe_dump({"models": models, "load-format": "dummy", "kv-cache-space": 0.01}))
    return start_host("--config", str(file))


def accepted(host: HostServer) -> dict[str, float]:
    """How many draft tokens were accepted, by model."""
    lines = host.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("tidewheel:spec_decode_num_accepted_tokens_total{")]
    return {line.partition('model_name="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}


def test_it_drafts_while_others_run_and_changes_no_token(host: HostServer) -> None:
    def ask(model: str, **fields: Any) -> Any:
        body = {"model": model, "prompt": "high tide", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        answer = host.http.post("/v1/completions", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    expected = ask("plain")
    streaming = {"model": "other", "prompt": "x", "max_tokens": 500, "n": 4, "ignore_eos": True, "stream": True}
    with host.http.stream("POST", "/v1/completions", json=streaming) as streamed:
        lines = (line for line in streamed.iter_lines() if line.startswith("data: "))
        next(lines)
        assert ask("drafted") == expected
        assert next(lines) != "data: [DONE]"
    assert ask("drafted", temperature=1, seed=1) == ask("plain", temperature=1, seed=1)
    assert accepted(host)["drafted"] > 0
    needs = {status.name: status.needs for status in host.models.host.snapshot()}
    assert needs["drafted"] is not None
    assert needs["plain"] is not None
    assert needs["drafted"].weight_bytes > 1.5 * needs["plain"].weight_bytes


def test_both_are_unloaded_and_loaded_together(host: HostServer) -> None:
    loading = {"model": "drafted"}
    for _ in range(2):
        assert host.http.post("/models/load", json=loading).status_code == 200
        eventually(lambda: "drafted" in host.http.get("/health").json()["ready"], "it is not loaded")
        used = host.models.budget.used_bytes
        assert host.http.post("/models/unload", json=loading).status_code == 200
        assert used - host.models.budget.used_bytes == host.models.host.status("drafted").needs.total_bytes  # type: ignore[union-attr]
