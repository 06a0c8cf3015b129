"""Serve and Kubernetes accept the files of deploy/ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidewheel.ray.settings import read_settings

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


def service() -> Any:
    return yaml.safe_load((FOLDER / "rayservice.yaml").read_text("utf-8"))


def configs() -> list[Any]:
    return [yaml.safe_load(text) for text in ((FOLDER / "serve.yaml").read_text(), service()["spec"]["serveConfigV2"])]


@pytest.mark.parametrize("config", configs(), ids=["serve.yaml", "rayservice.yaml"])
def test_serve_takes_the_configuration(config: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    import tidewheel.ray

    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "tidewheel.ray:app"
    assert type(tidewheel.ray.app(application.args)).__name__ == "Application"


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD names no ray.io_rayservices.yaml")
def test_kuberay_takes_the_service() -> None:
    import jsonschema

    versions = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text("utf-8"))["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if service()["apiVersion"] == f"ray.io/{v['name']}")
    validator = jsonschema.Draft202012Validator(without_unknown_fields(schema))
    assert [error.message for error in validator.iter_errors(service())] == []
    misspelt = service()
    misspelt["spec"]["rayClusterConfig"]["headGroupSpecs"] = misspelt["spec"]["rayClusterConfig"].pop("headGroupSpec")
    assert not validator.is_valid(misspelt)


def without_unknown_fields(schema: Any) -> Any:
    """The schema, but it refuses unknown fields. Kubernetes drops them silently."""
    if isinstance(schema, list):
        return [without_unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: without_unknown_fields(part) for name, part in schema.items()}
    if known.get("x-kubernetes-int-or-string"):
        known.pop("type", None)
    if known.get("type") == "object" and "properties" in known:
        known.setdefault("additionalProperties", known.get("x-kubernetes-preserve-unknown-fields", False))
    return known


def check_kubernetes_takes(thing: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_takes_the_pods() -> None:
    cluster = service()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        check_kubernetes_takes(pod)


def test_what_a_new_head_must_know_is_in_redis_and_no_replica_ends_with_the_head() -> None:
    cluster = service()["spec"]["rayClusterConfig"]
    options = cluster["gcsFaultToleranceOptions"]
    host, _, port = options["redisAddress"].rpartition(":")
    assert (bool(host), int(port)) == (True, 6379)
    container = {"name": "head", "image": "ray", "env": [{"name": "REDIS_PASSWORD", **options["redisPassword"]}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {"containers": [container]}}
    check_kubernetes_takes(pod)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_a_worker_has_the_cores_of_its_replica() -> None:
    spec = service()["spec"]
    settings, _ = read_settings(yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"])
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert int(workers["rayStartParams"]["num-cpus"]) == settings.num_cpus
    assert int(container["resources"]["limits"]["cpu"]) > settings.num_cpus
    assert (workers["minReplicas"], workers["maxReplicas"]) == (settings.min_replicas, settings.max_replicas)
