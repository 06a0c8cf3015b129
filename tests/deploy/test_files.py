"""The files that run Tidewheel elsewhere keep to their schemas, and fit the server and each other."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.proxies import ROOT
from server.conftest import ServerProcess, StartServer, dummy_model, start_server
from system_tools import require

from tidewheel.engine.declaring.values import count
from tidewheel.server.app_options import AppOptions
from tidewheel.server.http.auth import METRICS_PATHS
from tidewheel.server.http.options import HttpOptions
from tidewheel.server.options.serve import parse_options

__all__ = ["dummy_model", "start_server"]  # fixtures

COMPOSE = ROOT / "docker-compose.yml"
KUBERNETES = ROOT / "deploy/kubernetes"
UNIT = ROOT / "deploy/systemd/tidewheel.service"
GPUS = ROOT / "deploy/systemd/tidewheel.service.d/gpu.conf"
OLDEST, NEWEST = "1.30", "newest"  # versions of Kubernetes
SHUTDOWN_S = HttpOptions().shutdown_timeout + 5  # and for error events
_PR_SET_MDWE = 65


def check_compose(path: Path) -> tuple[int, str]:
    """The exit code of check-jsonschema, and what it says."""
    from check_jsonschema import main
    from click.testing import CliRunner

    done = CliRunner().invoke(main, ["--builtin-schema", "vendor.compose-spec", str(path)])
    return done.exit_code, done.output


def kubernetes_objects() -> list[dict[str, Any]]:
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [found for name in names for found in yaml.safe_load_all((KUBERNETES / name).read_text())]


def kubernetes_object(kind: str, name: str = "tidewheel") -> Any:
    (found,) = [o for o in kubernetes_objects() if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def test_compose_keeps_to_its_schema(tmp_path: Path) -> None:
    code, said = check_compose(COMPOSE)
    assert code == 0, said
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    code, said = check_compose(wrong)
    assert (code, "readonly" in said) == (1, True)


def test_compose_gives_the_container_no_more_than_it_needs() -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["tidewheel"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "healthcheck" not in service  # the image's own follows the port
    assert service["restart"] == "unless-stopped"
    assert int(service["stop_grace_period"].removesuffix("s")) > SHUTDOWN_S
    (cache,) = service["volumes"]
    assert f"HF_HOME={cache.partition(':')[2]}" in (ROOT / "Dockerfile.cpu").read_text()
    defaults = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for name, value in service["environment"].items()}
    assert parse_options([], defaults) == parse_options([], {})


def check_kubernetes_takes(thing: dict[str, Any], version: str) -> None:
    """Raises ValidationError."""
    import kubernetes_validate

    known = kubernetes_validate.latest_version() if version == NEWEST else version
    kubernetes_validate.validate(thing, known, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_the_manifests(version: str) -> None:
    from kubernetes_validate import ValidationError

    objects = kubernetes_objects()
    for found in objects:
        check_kubernetes_takes(found, version)
    assert sorted(found["kind"] for found in objects) == [
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "Service",
        "StatefulSet",
    ]
    wrong = kubernetes_object("StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(ValidationError, match="livenesProbe"):
        check_kubernetes_takes(wrong, version)


def kustomize(folder: Path) -> dict[str, Any]:
    """The resources that kustomize makes of a folder, by kind."""
    done = subprocess.run([require("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return {o["kind"]: o for o in yaml.safe_load_all(done.stdout)}


def test_kustomize_puts_them_together() -> None:
    made = kustomize(KUBERNETES)
    assert "PodMonitor" not in made  # most clusters do not know it
    for found in made.values():
        check_kubernetes_takes(found, NEWEST)
    (container,) = made["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"][0]["configMapRef"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert container["image"] == "registry.example.com/tidewheel:cpu"


def test_with_the_operator_prometheus_finds_the_replicas(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "kustomization.yaml"
    path.write_text(re.sub(r"^# (components:)\n#(   - .*)$", r"\1\n\2", path.read_text(), flags=re.MULTILINE))
    made = kustomize(tmp_path)
    monitor, pods = made["PodMonitor"], made["StatefulSet"]["spec"]["template"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == pods["spec"]["containers"][0]["ports"][0]["name"]
    assert endpoint["path"] in METRICS_PATHS


def test_the_manifests_fit_each_other_and_the_server() -> None:
    pods = kubernetes_object("StatefulSet")["spec"]["template"]
    (container,) = pods["spec"]["containers"]
    labels = pods["metadata"]["labels"]
    (port,) = container["ports"]
    for service in (kubernetes_object("Service"), kubernetes_object("Service", "tidewheel-replicas")):
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert kubernetes_object("StatefulSet")["spec"]["serviceName"] == "tidewheel-replicas"
    assert kubernetes_object("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = kubernetes_object("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"protocol": "TCP", "port": port["name"]}]]
    assert {(p["protocol"], p["port"]) for rule in policy["egress"] for p in rule["ports"]} == {
        ("UDP", 53), ("TCP", 53), ("TCP", 443)
    }  # fmt: skip
    secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"]}
    assert secrets.keys() == {"HF_TOKEN", "TIDEWHEEL_API_KEY", "TIDEWHEEL_SHARED_STORE_PASSWORD"}
    assert all(secret["optional"] for secret in secrets.values())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"] + SHUTDOWN_S
    assert pods["spec"]["terminationGracePeriodSeconds"] > wait
    assert f"USER {pods['spec']['securityContext']['runAsUser']}:" in (ROOT / "Dockerfile.cpu").read_text()
    literals = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    options = parse_options([], dict(literal.split("=", 1) for literal in literals))
    assert (options.engine.model, options.log.log_format) == ("HuggingFaceTB/SmolLM2-360M-Instruct", "json")


def test_a_service_of_kubernetes_does_not_set_options() -> None:
    # A Service named tidewheel would give its pods TIDEWHEEL_PORT=tcp://...
    with pytest.raises(SystemExit):
        parse_options([], {"TIDEWHEEL_PORT": "tcp://10.0.0.1:8000"})
    assert kubernetes_object("StatefulSet")["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_autoscaler_asks_for_a_metric_that_the_server_has(start_server: StartServer) -> None:
    autoscaler = kubernetes_object("HorizontalPodAutoscaler")["spec"]
    assert autoscaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "tidewheel"}
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert autoscaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    series = re.search(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert series is not None
    assert re.search(rf"^{series[1]}{{", start_server().http.get("/metrics").text, re.MULTILINE)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with a program that is there."""
    path = tmp_path / UNIT.name
    path.write_text(re.sub(r"(?<=^ExecStart=)\S+", sys.executable, UNIT.read_text(), flags=re.MULTILINE))
    return path


def test_systemd_takes_the_unit(unit: Path) -> None:
    command = [require("systemd-analyze"), "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("TimeoutStopSec", "TimeoutStoppSec"))
    assert "TimeoutStoppSec" in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_the_drop_ins_of_the_docs_suit_the_unit(unit: Path) -> None:
    drop_ins = re.findall(r"^```ini\n(.*?)^```$", (ROOT / "docs/deploying.md").read_text(), re.MULTILINE | re.DOTALL)
    folder = unit.with_name(f"{unit.name}.d")
    folder.mkdir()
    for i, drop_in in enumerate(drop_ins):
        (folder / f"{i}.conf").write_text(drop_in)
    shutil.copy(GPUS, folder)
    command = [require("systemd-analyze"), "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    (folder / "0.conf").write_text(drop_ins[0].replace("LoadCredential", "LoadCredentials"))
    assert "LoadCredentials" in subprocess.run(command, capture_output=True, text=True, check=False).stderr
    loaded = {name for drop_in in drop_ins for name in re.findall(r"^LoadCredential=([\w-]+):/", drop_in, re.MULTILINE)}
    variables = dict(re.findall(r"^Environment=(\w+)=%d/([\w-]+)$", "".join(drop_ins), re.MULTILINE))
    assert set(variables.values()) == loaded
    assert parse_options([], variables).app.api_key_file == variables["TIDEWHEEL_API_KEY_FILE"]
    assert "HF_TOKEN_PATH" in variables  # of huggingface_hub: tests/engine/weights/test_hub.py


@pytest.mark.parametrize("files", [[UNIT], [UNIT, GPUS]], ids=["unit", "gpu"])
def test_the_unit_lets_the_service_do_little(unit: Path, files: list[Path]) -> None:
    unit.write_text("".join(file.read_text() for file in files))  # systemd-analyze reads no drop-ins of a file
    command = [require("systemd-analyze"), "security", "--offline=yes", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "offline" in done.stderr:
        pytest.skip("systemd is older than 250")
    exposure = re.search(r"exposure level .*: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stderr
    assert float(exposure[1]) <= 2  # of 10


def test_the_unit_restarts_what_may_get_better_and_waits_for_the_end() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert float(settings["TimeoutStopSec"].removesuffix("s")) > SHUTDOWN_S
    assert settings["KillSignal"] == "SIGTERM"
    assert settings["Restart"] == "on-failure"
    with pytest.raises(SystemExit) as wrong_option:
        parse_options(["--no-such-option"], {})
    assert settings["RestartPreventExitStatus"] == str(wrong_option.value.code)


def test_a_server_needs_no_memory_that_is_writable_and_executable(dummy_model: Path) -> None:
    """As MemoryDenyWriteExecute= of the unit has it."""

    def deny() -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_MDWE, 1, 0, 0, 0):
            os.write(2, b"MDWE is not supported\n")
            os._exit(1)

    try:
        server = ServerProcess(str(dummy_model), "--load-format", "dummy", preexec_fn=deny)
    except RuntimeError as error:
        if "MDWE is not supported" not in str(error):
            raise
        pytest.skip("the kernel is older than 6.3")
    server.stop()


def test_nginx_takes_bodies_as_large_as_the_server() -> None:
    conf = (ROOT / "deploy/nginx/tidewheel.conf").read_text()
    (size,) = re.findall(r"^\s*client_max_body_size (\w+);", conf, re.MULTILINE)
    assert count(size.upper()) == AppOptions().body_limit(has_images=True)
