"""Replicas on Ray Serve, on one machine: what clients see while replicas end and others take their place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import lora_files
import psutil
import pytest
import served_replicas
from lost_replicas import lose_a_replica, stream
from ports import free_port
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray_clusters import SERVE_ENVIRONMENT
from served_replicas import KEY, ReplicasClient, processes_of
from waiting import wait_until

import tidewheel.ray

# test_cluster.py has what clients see of replicas that stay as they are, for `make test`.
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning"),
]

OPTIONS = {
    "num_replicas": 2,
    "num_cpus": 1,
    "routing_stats_period_s": 0.5,
    "health_check_period_s": 1,
    "kv_cache_space": 0.1,
    "api_key": KEY,
    "protect_metrics": True,
    "shutdown_timeout": 20,
}
_ENVIRONMENT = {
    **SERVE_ENVIRONMENT,
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


class Replicas(ReplicasClient):
    """The server, as a client and its operator see it."""

    def models(self) -> list[str]:
        """What is served."""
        return [card["id"] for card in self.http.get("/v1/models").json()["data"]]

    def metrics(self, **kwargs: Any) -> dict[str, Metric]:
        """A scrape by whichever replica."""
        found = [*text_string_to_metric_families(self.http.get("/metrics", **kwargs).text)]
        metrics = {metric.name: metric for metric in found}
        assert len(metrics) == len(found)
        return metrics

    @staticmethod
    def processes() -> list[psutil.Process]:
        """The processes of the replicas."""
        return processes_of(psutil.Process())


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    before, folder = dict(os.environ), Path.cwd()
    os.environ.update(_ENVIRONMENT)
    os.environ.pop("RAY_ADDRESS", None)
    os.chdir(tmp_path_factory.mktemp("ray"))  # Ray's workers import from the folder that it is started in
    import ray
    from ray import serve

    port = free_port()
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy()
        yield Replicas(f"http://127.0.0.1:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def deploy(**changes: Any) -> None:
    from ray import serve

    serve.run(tidewheel.ray.app({**OPTIONS, **changes}), name="tidewheel", route_prefix="/")


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The changes of the update: another name, and a store for adapters that clients load."""
    adapters = {"enable_lora": True, "allow_runtime_lora_updating": True, "max_loras": 2}
    return {"served_model_name": "another", "shared_store": str(tmp_path_factory.mktemp("store")), **adapters}


def test_a_conversation_stays_where_its_prefix_lies(replicas: Replicas) -> None:
    served_replicas.check_conversations_stay_where_their_prefixes_lie(replicas)


def test_the_metrics_need_the_key(replicas: Replicas) -> None:
    assert replicas.http.get("/metrics", headers={"authorization": "Bearer another"}).status_code == 401


def test_any_replica_tells_the_metrics_of_all(replicas: Replicas) -> None:
    def answered() -> Counter[str]:
        finished = Counter[str]()
        for sample in replicas.metrics()["tidewheel:request_success"].samples:
            finished[sample.labels["replica"]] += int(sample.value)
        return finished

    before, asked = answered(), Counter[str]()
    for i in range(12):
        asked[replicas.ask(f"{i} and one?", headers={"x-session-id": f"count {i}"}).headers["x-tidewheel-replica"]] += 1
    assert len(asked) == 2
    wait_until(lambda: answered() - before == asked)
    assert running(replicas) == 2
    assert {sample.labels["replica"] for sample in replicas.metrics()["process_cpu_seconds"].samples} == {*asked}


def test_a_replica_that_hangs_is_missing_in_the_metrics_alone(replicas: Replicas) -> None:
    sessions = [{"x-session-id": f"scrape {i}"} for i in range(8)]
    by_replica = {replicas.http.get("/metrics", headers=one).headers["x-tidewheel-replica"]: one for one in sessions}
    stopped = replicas.processes()[0].pid
    with ThreadPoolExecutor(2) as pool:
        time.sleep(0.6)  # an answer may be half a second old
        os.kill(stopped, signal.SIGSTOP)
        scrapes = {pool.submit(replicas.metrics, headers=one): name for name, one in by_replica.items()}
        first = next(as_completed(scrapes))  # by the other one
        os.kill(stopped, signal.SIGCONT)
    metrics = first.result()
    assert [metrics[f"tidewheel:{count}"].samples[0].value for count in ("replicas", "replicas_silent")] == [2, 1]
    (series,) = metrics["tidewheel:num_requests_running"].samples
    assert series.labels["replica"] == scrapes[first]


def test_a_replica_that_dies_breaks_its_own_streams_alone(replicas: Replicas) -> None:
    lose_a_replica(replicas.http, lambda: os.kill(replicas.processes()[0].pid, signal.SIGKILL), streams=16, length=150)
    wait_until(lambda: len(replicas.processes()) == 2)


def test_an_update_fails_no_request(replicas: Replicas, update: dict[str, Any]) -> None:
    before, done, statuses = {process.pid for process in replicas.processes()}, threading.Event(), []

    def ask_on() -> None:
        while not done.is_set():
            response = replicas.ask(f"Question {len(statuses)}")
            statuses.append((response.status_code, response.headers.get("x-tidewheel-replica")))

    with ThreadPoolExecutor(3) as pool:
        asking = pool.submit(ask_on)
        long = pool.submit(stream, replicas.http, "Tell me a long story", 1200)
        deploy(**update)
        wait_until(lambda: before.isdisjoint(process.pid for process in replicas.processes()))
        wait_until(lambda: len(replicas.processes()) == 2)
        done.set()
        asking.result()
        assert long.result().error is None
    assert {status for status, _ in statuses} == {200}
    assert len({replica for _, replica in statuses}) > 1  # one before the update and one after it, at the least
    assert replicas.models() == ["another"]


def test_all_replicas_serve_and_forget_an_adapter(replicas: Replicas, update: dict[str, Any], tmp_path: Path) -> None:
    if replicas.models() != ["another"]:  # the test before this one was left out
        deploy(**update)
    lora_files.write(tmp_path, lora_files.tensors(1, hidden=256, kv=128, layers=6))

    def ask_both(model: str) -> tuple[set[int], set[str]]:
        """Send enough requests at a time that each replica gets some. The statuses, and the texts of the answers."""
        body = {"model": model, "prompt": "The tide", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        statuses, texts, names = set[int](), set[str](), set[str]()
        with ThreadPoolExecutor(8) as pool:
            while len(names) < 2:
                for answer in pool.map(lambda _: replicas.http.post("/v1/completions", json=body), range(8)):
                    names.add(answer.headers["x-tidewheel-replica"])
                    statuses.add(answer.status_code)
                    texts |= {choice["text"] for choice in answer.json().get("choices", ())}
        return statuses, texts

    base = ask_both("another")
    loaded = replicas.http.post("/v1/load_lora_adapter", json={"lora_name": "poems", "lora_path": str(tmp_path)})
    assert loaded.status_code == 200, loaded.text
    adapted = ask_both("poems")
    assert base[0] == adapted[0] == {200}
    assert len(base[1]) == len(adapted[1]) == 1
    assert base[1] != adapted[1]
    assert replicas.models() == ["another", "poems"]
    assert replicas.http.post("/v1/unload_lora_adapter", json={"lora_name": "poems"}).status_code == 200
    assert ask_both("poems") == ({404}, set())
    assert replicas.models() == ["another"]


def running(replicas: Replicas) -> float:
    """How many replicas there are, as the metrics have it."""
    return float(replicas.metrics()["tidewheel:replicas"].samples[0].value)


def test_replicas_come_when_prompts_wait_and_go_when_none_do(replicas: Replicas) -> None:
    limits = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0}
    targets = {"target_ongoing_requests": 1000, "target_waiting_requests": 2}
    deploy(num_replicas=None, autoscaling="wait", max_num_seqs=1, shutdown_timeout=0, **limits, **targets)
    wait_until(lambda: len(replicas.processes()) == 1)
    wait_until(lambda: running(replicas) == 1)
    statuses, done = set(), threading.Event()

    def ask_on(number: int) -> None:
        while not done.is_set():
            statuses.add(replicas.ask(f"Question {number}", max_tokens=200).status_code)

    with ThreadPoolExecutor(16) as pool:
        asking = [pool.submit(ask_on, number) for number in range(16)]
        try:
            wait_until(lambda: running(replicas) == 2 or any(future.done() for future in asking))
        finally:
            done.set()
    assert len(replicas.processes()) == 2
    assert statuses == {200}
