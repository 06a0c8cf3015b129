"""Pipelines whose stages are actors on a cluster's nodes: the bits of one process, also after stages have ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lora_files
import models_zoo
import mtp_zoo
import psutil
import pytest
from engine.pipeline.cases import CASES, SWEPT, Case, answers
from ray_clusters import PATIENCE, start_node
from waiting import wait_until

import tidewheel.offline.model
from tidewheel import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from tidewheel.engine.cancellation import Cancellation
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.pipeline import executor
from tidewheel.engine.pipeline.speed import StageCores, StageSpeed
from tidewheel.engine.pipeline.stage_plan import StagePlan
from tidewheel.engine.pipeline.stages import Launch, Stages
from tidewheel.server.commands.devices import detect

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from tidewheel.ray.stages import RayHost

# For `make test`, test_cluster.py has two stages in a real cluster, and tests/engine/pipeline processes of one machine.
pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1200)]

LONG = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = [[5, 6, 7, index] for index in range(3, 7)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node that says it has four cores. Further nodes can be added."""
    before, folder = dict(os.environ), Path.cwd()
    os.environ.update({**PATIENCE, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
    os.environ.pop("RAY_ADDRESS", None)
    os.chdir(tmp_path_factory.mktemp("ray"))  # Ray's workers import from the folder that it is started in
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        start_node(cluster, num_cpus=4, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def hosted(stages: int, monkeypatch: pytest.MonkeyPatch, cpus: int = 1, **options: Any) -> Iterator[RayHost]:
    """A place for stages, which models are loaded in meanwhile. The nodes have this machine's cores in common."""
    from tidewheel.ray.stages import RayHost

    with (
        RayHost(stages, cpus, environment={}, **{"bind_cores": False, **options}) as host,
        monkeypatch.context() as patch,
    ):
        patch.setattr(tidewheel.offline.model, "load_engine", partial(load_engine, host=host))
        yield host


def processes() -> list[psutil.Process]:
    """The processes of stages, in no order."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "StageActor" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            pass
    return found


@pytest.mark.parametrize("case", [*CASES, *SWEPT], ids=lambda case: case.id)
def test_stages_on_nodes_give_the_bits_of_one_process(
    case: Case, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models_zoo.folder(case.model, tokenizer=True)
    options = dict(case.options)
    with hosted(case.stages, monkeypatch):
        found = answers(folder, **options, pipeline_parallel_size=case.stages)
    assert found == answers(folder, **options)


def test_a_slow_node_gets_fewer_layers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    options = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 10}}
    with hosted(2, monkeypatch) as host, caplog.at_level("INFO"):
        assert all(speed.read_bytes > 1e6 for speed in host.measure([0, 1], "bfloat16_flops"))
        slow, fast = StageSpeed(10e9, 100e9), StageSpeed(40e9, 400e9)
        monkeypatch.setattr(host, "cores", lambda: [StageCores("a", 1, 0.0), StageCores("b", 1, 0.0)])
        monkeypatch.setattr(host, "measure", lambda stages, ceiling: [slow, fast])
        found = answers(folder, **options, pipeline_parallel_size=2)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "The stages have 2,8 layers, and not 5,5 as equal ones would, by measured speed: stage 1 reads 10.0" in said
    assert found == answers(folder, **options)


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_stages_on_nodes_draft(method: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model beside the first of them, or the checkpoint's layer behind the last."""
    folder = mtp_zoo.folder("qwen3_5")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(models_zoo.folder("llama-tied"))
    options: dict[str, Any] = {"skip_tokenizer_init": True}
    with hosted(2, monkeypatch):
        found = answers(folder, **options, pipeline_parallel_size=2, speculative_config=config)
    assert found == answers(folder, **options)


def test_stages_on_nodes_have_adapters(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their own parts of them, also while they run, and when they have started again."""
    folder = str(models_zoo.folder("llama", tokenizer=True))
    paths = [lora_files.write(tmp_path / str(seed), lora_files.tensors(seed)) for seed in range(2)]
    requests = [LoRARequest(path.name, 1 + index, str(path)) for index, path in enumerate(paths)]

    def adapted(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(PROMPTS[:3], SHORT, use_tqdm=False, lora_request=[*requests, None])
        return [list(output.outputs[0].token_ids) for output in outputs]

    options: dict[str, Any] = {"device": "cpu", "max_model_len": 4096, "enable_lora": True, "max_loras": 2}
    options["hf_overrides"] = {"max_position_embeddings": 8192}
    with LLM(folder, **options) as llm:
        expected = adapted(llm)
    with hosted(2, monkeypatch), LLM(folder, **options, pipeline_parallel_size=2) as llm:
        assert adapted(llm) == expected
        run_until(llm, lambda: processes()[0].kill())
        assert adapted(llm) == expected


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="groups of cores need two of them")
def test_stages_on_nodes_have_groups_of_cores(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    with hosted(2, monkeypatch, cpus=2), caplog.at_level("INFO"):
        found = answers(folder, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert found == answers(folder)
    stages = [record.getMessage() for record in caplog.records if "GiB of weights" in record.getMessage()]
    assert [len(text.split("CPUs ")[1].split(", ")[0].split("|")) for text in stages] == [2, 2]
    with pytest.raises(TidewheelError, match="--tensor-parallel-size 3 needs as many cores in each stage, which has 1"):
        long_running(distributed_executor_backend="ray", cpus_per_replica=1, tensor_parallel_size=3)


def test_the_stages_of_an_llm_are_in_the_cluster_that_the_program_is_connected_to(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from tidewheel.ray import stages

    # Other tests' replicas may have the machine's cores.
    monkeypatch.setattr(stages, "RayHost", partial(stages.RayHost, bind_cores=False))
    with long_running(pipeline_parallel_size=1) as llm:
        expected = answers_of(llm)
    with long_running(distributed_executor_backend="ray", cpus_per_replica=1) as llm:
        assert len(processes()) == 2
        assert answers_of(llm) == expected
    wait_until(lambda: not processes())
    assert ray.is_initialized()  # by the program, which goes on


def test_a_stage_that_ends_ends_what_runs_and_nothing_else(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with long_running(pipeline_parallel_size=1) as llm:
        expected = answers_of(llm)
    with hosted(2, monkeypatch), caplog.at_level("INFO"), long_running() as llm:
        assert answers_of(llm) == expected
        stages = [record.getMessage() for record in caplog.records if "GiB of weights" in record.getMessage()]
        assert [text.split(":")[0] for text in stages] == [
            "pipeline stage 1 of 2 (layer 0)",
            "pipeline stage 2 of 2 (layer 1)",
        ]
        pid = int(stages[1].split("process ")[1].split()[0])
        said = run_until(llm, lambda: os.kill(pid, signal.SIGKILL))
        assert f"pipeline stage 2 of 2 (layer 1), process {pid} on node " in said
        assert "has ended" in said
        assert answers_of(llm) == expected
        assert pid not in {process.pid for process in processes()}
    wait_until(lambda: not processes())


@pytest.mark.parametrize("stage", [0, 1])
def test_the_stage_at_which_a_step_stays_is_named(
    stage: int, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "SLOW_S", 0.2)
    with hosted(2, monkeypatch) as host, caplog.at_level("INFO"):
        running: list[Stages] = []
        launch = host.launch

        def kept_launch(plans: Sequence[StagePlan], weight_bytes: int) -> Launch:
            def start(cancellation: Cancellation) -> Stages:
                running.append(launch(plans, weight_bytes)(cancellation))
                return running[-1]

            return start

        monkeypatch.setattr(host, "launch", kept_launch)
        with long_running() as llm:
            expected = answers_of(llm)
            assert (running[0].where(1, {}), running[0].where(10**9, {})) == (1, 0)  # all have ended it, and none
            place = running[0].place(stage)
            pid = int(place.split()[1])
            os.kill(pid, signal.SIGSTOP)
            found: list[list[list[int]]] = []
            asking = threading.Thread(target=lambda: found.append(answers_of(llm)))
            asking.start()
            said = f"waits for pipeline stage {stage + 1} of 2 (layer {stage}), {place}"
            try:
                wait_until(lambda: any(said in record.getMessage() for record in caplog.records))
            finally:
                os.kill(pid, signal.SIGCONT)
                asking.join()
            assert found == [expected]


def test_devices_shows_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    program = [str(Path(sys.executable).with_name("tidewheel")), "devices"]
    command = [*program, "--json", "--ray-address", cluster.address]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (node,) = json.loads(done.stdout)
    here = detect()
    assert (node["address"], node["cpus"]) == (cluster.address.rpartition(":")[0], 4)
    assert (node["findings"]["isa"], node["findings"]["auto"]) == (here.isa, here.auto)
    assert here.cpu_model in node["findings"]["processor"]
    assert node["takes"] == {"replicas": 4, "layers": None}
    folder = str(models_zoo.folder("llama-tied", tokenizer=True))
    asked = ["--model", folder, "--quantization", "int8", "--cpus-per-replica", "2"]
    done = subprocess.run([*command, *asked], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["takes"] == {"replicas": 2, "layers": 2}


def test_stages_are_on_nodes_of_their_own_and_outlive_a_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [start_node(cluster, num_cpus=1) for _ in range(2)]
    try:
        with hosted(2, monkeypatch), long_running() as llm:
            expected = answers_of(llm)
            lost = next(node for node in nodes if stages_of(node))
            nodes.remove(lost)
            assert len(stages_of(lost)) == 1
            assert "pipeline" in run_until(llm, lambda: cluster.remove_node(lost, allow_graceful=False))
            assert answers_of(llm) == expected
    finally:
        for node in nodes:
            cluster.remove_node(node)


def long_running(**options: Any) -> LLM:
    """Two stages that need long for LONG."""
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    options = {"max_model_len": 4096, "hf_overrides": {"max_position_embeddings": 8192}, **options}
    return LLM(str(folder), **{"device": "cpu", "pipeline_parallel_size": 2, **options})


def answers_of(llm: LLM) -> list[list[int]]:
    regex = StructuredOutputsParams(regex="(ab|cd){2,9}x")
    params = [SHORT, SHORT, SHORT, SamplingParams(max_tokens=16, temperature=0.0, structured_outputs=regex)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def run_until(llm: LLM, end: Callable[[], object]) -> str:
    """The error of a request that runs when `end` ends its stage."""
    ending = threading.Timer(0.3, end)
    ending.start()
    (output,) = llm.generate([PROMPTS[0]], LONG, use_tqdm=False)
    ending.join()
    assert output.outputs[0].finish_reason == "error"
    return output.outputs[0].error or ""


def stages_of(node: Any) -> set[int]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return {process.pid for process in processes()} & {child.pid for child in raylet.children(recursive=True)}


def test_a_node_that_lacks_the_files_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(models_zoo.folder("llama-tied", tokenizer=True), tmp_path / "here" / "model")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with (
        hosted(2, monkeypatch, folder=str(tmp_path / "there")),
        pytest.raises(TidewheelError, match=r"pipeline stage \d of 2 on node [0-9.]+: .*\./model"),
    ):
        LLM("./model", device="cpu", max_model_len=64, pipeline_parallel_size=2)
    wait_until(lambda: not processes())


def test_a_cluster_without_room_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidewheel.ray import stages

    monkeypatch.setattr(stages, "_PLACED_S", 0.5)
    # A node of one core that a test has removed may still be known.
    said = "no room for 2 stages of 5 cores: its nodes have 4(, 1)* cores"
    with pytest.raises(TidewheelError, match=said):
        stages.RayHost(2, 5, environment={})


def test_the_server_command_starts_a_cluster_and_leaves_nothing(tmp_path: Path) -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    socket = str(tmp_path / "server.sock")
    program = str(Path(sys.executable).with_name("tidewheel"))
    command = [program, "serve", str(folder), "--device", "cpu", "--max-model-len", "64", "--uds", socket]
    command += ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "ray", "--served-model-name", "tiny"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            ask = ["curl", "-s", "--unix-socket", socket, "http://x/v1/completions"]
            ask += [
                "-H",
                "content-type: application/json",
                "-d",
                '{"model": "tiny", "prompt": [5, 6], "max_tokens": 3}',
            ]
            wait_until(
                lambda: (
                    process.poll() is not None
                    or '"choices"' in subprocess.run(ask, capture_output=True, text=True, check=False).stdout
                )
            )
            children = psutil.Process(process.pid).children(recursive=True)
            assert any("StageActor" in " ".join(child.cmdline()) for child in children)
            process.terminate()
            _, said = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "pipeline stage 2 of 2 (layer 1): process" in said
    wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
