"""Replicas on Ray Serve that load several models on demand: each request goes where its model is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lost_replicas import REPLICA
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from ray_clusters import SERVE_ENVIRONMENT
from server.conftest import dummy_model
from waiting import wait_until

import tidewheel.ray

__all__ = ["dummy_model"]  # a fixture
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning"),
]
NAMES = [f"model-{i}" for i in range(6)]


@pytest.fixture(scope="module")
def client(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    before, folder = dict(os.environ), Path.cwd()
    os.environ.update(SERVE_ENVIRONMENT)
    os.environ.pop("RAY_ADDRESS", None)
    models = tmp_path_factory.mktemp("models")
    paths = {name: {"model": str(shutil.copytree(dummy_model, models / name))} for name in NAMES}
    (models / "models.yaml").write_text(json.dumps({"models": paths}))
    os.chdir(tmp_path_factory.mktemp("ray"))  # Ray's workers import from the folder that it is started in
    import ray
    from ray import serve

    port = free_port()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    options = {"config": str(models / "models.yaml"), "load_format": "dummy", "memory": "1", "kv_cache_space": 0.01}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = {"num_replicas": 2, "num_cpus": 1, "routing_stats_period_s": 0.5}
        serve.run(tidewheel.ray.app({**settings, **options}), name="tidewheel", route_prefix="/")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
        serve.shutdown()
    finally:
        ray.shutdown()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def ask(client: httpx.Client, model: str, number: int) -> str:
    """The replica that answers a conversation."""
    messages = [{"role": "user", "content": f"conversation {number}"}]
    body = {"model": model, "messages": messages, "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-session-id": f"{model} {number}"})
    assert answer.status_code == 200, answer.text
    return answer.headers[REPLICA]


def loaded(client: httpx.Client) -> dict[str, set[str]]:
    """The models that each replica has loaded, as the metrics of all have it."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "tidewheel:model_memory_bytes":
                found.setdefault(sample.labels["replica"], set()).add(sample.labels["model_name"])
    return found


def test_each_model_is_loaded_by_one_replica(client: httpx.Client) -> None:
    homes = {name: {ask(client, name, number) for number in range(6)} for name in NAMES}
    assert all(len(replicas) == 1 for replicas in homes.values()), homes
    by_replica: dict[str, set[str]] = {}
    for name, replicas in homes.items():
        by_replica.setdefault(*replicas, set()).add(name)
    assert len(by_replica) == 2
    wait_until(lambda: loaded(client) == by_replica)


def test_what_would_reach_one_replica_is_refused(client: httpx.Client) -> None:
    for path in ("/models/load", "/models/unload"):
        assert client.post(path, json={"model": NAMES[0]}).status_code == 403
