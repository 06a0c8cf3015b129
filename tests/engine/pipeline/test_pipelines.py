"""Pipelines give the same bits as one process, whatever runs in them, and leave no process behind."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models_zoo
import pytest
from cores import one_core
from engine.pipeline.cases import CASES, IN_GROUPS, OPTIONS, SWEPT, SWEPT_IN_GROUPS, Case, answers, expected
from engine.pipeline.processes import children_of, kill_soon
from waiting import wait_until

from tidewheel import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tidewheel.engine.devices.cpu.device import thread_groups
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.loading.stages import local_stages
from tidewheel.engine.pipeline import executor, restarts
from tidewheel.engine.pipeline.speed import StageCores, StageSpeed

CORES = [cpu for group in thread_groups("any", CpuOptions()) for cpu in group]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEPT)], ids=lambda case: case.id
)
def test_stages_give_the_bits_of_one_process(case: Case) -> None:
    folder = models_zoo.folder(case.model, tokenizer=True)
    options = dict(case.options)
    assert answers(folder, **options, pipeline_parallel_size=case.stages) == expected(case.model, case.options)


# A process starts for each stage.
@pytest.mark.skipif(len(CORES) < 2, reason="groups of cores need two of them")
@pytest.mark.parametrize(
    "case",
    [*IN_GROUPS, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEPT_IN_GROUPS)],
    ids=lambda case: case.id,
)
def test_groups_of_cores_in_stages_give_the_bits_of_one_process(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    folder = models_zoo.folder(case.model, tokenizer=True)
    options = dict(case.options)
    with caplog.at_level("INFO"):
        found = answers(folder, **options, pipeline_parallel_size=case.stages, tensor_parallel_size=2)
    assert found == expected(case.model, case.options)
    stages = [record.getMessage() for record in caplog.records if "GiB of weights" in record.getMessage()]
    assert len(stages) == case.stages
    assert all(re.search(r"on CPUs [\d,-]+\|[\d,-]+, ", text) for text in stages)


# Three processes start.
def test_layers_are_shared_out_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    options = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 5}}
    with caplog.at_level("INFO"):
        found = answers(folder, **options, pipeline_parallel_size=3, pipeline_split="1,3,1")
    assert found == answers(folder, **options, threads_bind=one_core())
    stages = [record.getMessage() for record in caplog.records if "pipeline stage" in record.getMessage()]
    assert [text.split(":")[0] for text in stages] == [
        "pipeline stage 1 of 3 (layer 0)",
        "pipeline stage 2 of 3 (layers 1-3)",
        "pipeline stage 3 of 3 (layer 4)",
    ]


def test_a_slow_stage_gets_fewer_layers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(local_stages, "cores_at", lambda machine, cpus: StageCores(machine, 1, 1000.0 * (1 + cpus[0])))
    speed = {0: StageSpeed(10e9, 100e9), 1: StageSpeed(40e9, 400e9)}
    monkeypatch.setattr(local_stages, "measure", lambda isa, cpus, ceiling: speed[cpus[0]])
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    options = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 10}}
    bound = {"pipeline_parallel_size": 2, "threads_bind": "0|1"}
    with caplog.at_level("INFO"):
        found = answers(folder, **options, **bound)
    said = [record.getMessage() for record in caplog.records if "by measured speed" in record.getMessage()]
    assert said == [
        "The stages have 2,8 layers, and not 5,5 as equal ones would, by measured speed: stage 1 reads 10.0 GB/s and "
        "computes 100 G operations/s, stage 2 reads 40.0 GB/s and computes 400 G operations/s"
    ]
    assert any("pipeline stage 2 of 2 (layers 2-9): process" in record.getMessage() for record in caplog.records)
    assert found == answers(folder, **options, threads_bind=one_core())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 3, reason="needs groups of one and of two processors")
def test_groups_of_cores_that_differ_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    one, *two = sorted(os.sched_getaffinity(0))[:3]
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    options = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 30}}
    bound = {"pipeline_parallel_size": 2, "threads_bind": f"{one}|{two[0]},{two[1]}"}
    with caplog.at_level("INFO"):
        found = answers(folder, **options, **bound)
    assert any("by measured speed" in record.getMessage() for record in caplog.records)
    assert found == answers(folder, **options)


# Two engines start, one of them in two processes.
def test_structured_answers_searches_and_drafts_run_in_stages() -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    prompts = ["one", "two words", "three more words"]
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    plain = SamplingParams(max_tokens=16, temperature=0.0)
    regex = StructuredOutputsParams(regex="(ab|cd){2,9}x")
    structured = SamplingParams(max_tokens=16, temperature=0.0, structured_outputs=regex)
    found = []
    for stages in ({"threads_bind": one_core()}, {"pipeline_parallel_size": 2}):
        with LLM(str(folder), device="cpu", max_model_len=128, **stages, **ngram) as llm:
            searched = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
            beams = [[sequence.tokens for sequence in output.sequences] for output in searched]
            answered = llm.generate(prompts, structured, use_tqdm=False)
            drafted = llm.generate(prompts, plain, use_tqdm=False)
        found.append([beams, *(output.outputs[0].token_ids for output in (*answered, *drafted))])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 100000}, "--tensor-parallel-size 100000 needs as many cores"),
        ({"pipeline_parallel_size": 3}, "3 is more than the 2 stages"),
        ({"pipeline_split": "1,2"}, "names 3 layers, and the model has 2"),
        ({"pipeline_split": "1,1,1"}, "--pipeline-split names 3 stages"),
        ({"device": "torch"}, "needs --device cpu"),
        ({"threads_bind": "0|1|2"}, "--threads-bind"),
        (
            {"threads_bind": "0|1", "tensor_parallel_size": 2},
            "need 4 cores, and there are 2|--threads-bind: this process may not use CPU 1",
        ),
    ],
)
def test_what_cannot_be_in_a_pipeline_is_refused(options: dict[str, Any], words: str) -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    with pytest.raises(TidewheelError, match=words):
        LLM(str(folder), **{**OPTIONS, "pipeline_parallel_size": 2, **options})
    assert children_of(os.getpid()) == []


def test_layers_that_watch_others_and_a_folder_for_blocks_are_refused(tmp_path: Path) -> None:
    folder = str(models_zoo.folder("llama-tied", tokenizer=True))
    with pytest.raises(TidewheelError, match="--kv-offload do not work together"):
        LLM(folder, **OPTIONS, pipeline_parallel_size=2, kv_offload=str(tmp_path))
    layer = {"method": "eagle3", "model": folder}
    with pytest.raises(TidewheelError, match="EAGLE3 layers do not work together"):
        LLM(folder, **OPTIONS, pipeline_parallel_size=2, speculative_config=layer)


def test_layers_that_share_k_and_v_stay_in_one_stage() -> None:
    folder = models_zoo.folder("gemma3n", tokenizer=True)
    with pytest.raises(TidewheelError, match=r"is more than the .* stages that the model can be split into"):
        LLM(str(folder), **OPTIONS, pipeline_parallel_size=64)


def test_a_broken_file_is_told_by_the_stage_that_reads_it(tmp_path: Path) -> None:
    whole = models_zoo.folder("llama-tied", tokenizer=True)
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4096:] = b"\xff" * 4096  # not numbers
    weights.write_bytes(data)
    with pytest.raises(TidewheelError, match=r"pipeline stage \d of 2 \(layer \d\): ") as failure:
        LLM(str(tmp_path), **OPTIONS, pipeline_parallel_size=2)
    assert "\n" not in str(failure.value)
    assert children_of(os.getpid()) == []


LONG = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)


def long_running(**options: Any) -> LLM:
    """Two stages that need long for LONG."""
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    overrides = {"max_position_embeddings": 8192}
    return LLM(
        str(folder), device="cpu", max_model_len=4096, pipeline_parallel_size=2, hf_overrides=overrides, **options
    )


# Two processes start, and start again.
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_a_stage_that_is_killed_ends_what_runs_with_its_name_and_nothing_else(stage: int) -> None:
    short = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [[5, 6, 7, index] for index in range(3, 7)]
    with long_running(max_num_seqs=2) as llm:
        expected = llm.generate(prompts, short, use_tqdm=False)
        killing = kill_soon(stage)
        params = [LONG, LONG, short, short]  # the last two wait
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        killing.join()
        for output in outputs[:2]:
            assert output.finish_reason == "error"
            assert f"pipeline stage {stage + 1} of 2 (layer {stage}) was killed by SIGKILL" in (output.error or "")
            assert "send the request again" in (output.error or "")
        assert [output.token_ids for output in outputs[2:]] == [one.outputs[0].token_ids for one in expected[2:]]
        again = llm.generate(prompts, short, use_tqdm=False)  # whose blocks were in the cache that is gone
        assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in expected]
        assert [one.num_cached_tokens for one in again] == [0] * 4
    assert children_of(os.getpid()) == []


# Two processes start, and start again.
@pytest.mark.sweep
def test_a_stage_that_ends_while_nothing_runs_harms_nobody() -> None:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    with LLM(str(folder), **OPTIONS, pipeline_parallel_size=2) as llm:
        before = children_of(os.getpid())
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: len(now := children_of(os.getpid())) == 2 and not {*now} & {*before})
        output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].outputs[0]
        assert output.finish_reason == "length"


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_the_stage_at_which_a_step_stays_is_named(
    stage: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "SLOW_S", 0.2)
    with long_running() as llm:
        short = SamplingParams(max_tokens=8, temperature=0.0)
        expected = llm.generate([[5, 6, 7]], short, use_tqdm=False)[0].outputs[0].token_ids
        pid = children_of(os.getpid())[stage]
        os.kill(pid, signal.SIGSTOP)
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(llm.generate([[5, 6, 7]], short, use_tqdm=False)))
        asking.start()
        said = f"waits for pipeline stage {stage + 1} of 2 (layer {stage}), process {pid}"
        wait_until(lambda: any(said in record.getMessage() for record in caplog.records))
        os.kill(pid, signal.SIGCONT)
        asking.join()
        assert found[0].outputs[0].token_ids == expected


# Two processes start, and start again. test_restarts.py counts how often they do.
@pytest.mark.sweep
def test_stages_that_end_again_and_again_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restarts, "_MOST", 1)
    with long_running() as llm:

        def run_until_killed() -> None:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)  # when all stages run
            killing = kill_soon(1)
            outputs = llm.generate([[5, 6, 7]], LONG, use_tqdm=False)
            killing.join()
            assert outputs[0].outputs[0].finish_reason == "error"

        run_until_killed()
        said = r"was killed by SIGKILL.*Stages have ended too often to be restarted"
        with pytest.raises(TidewheelError, match=said):  # noqa: PT012 - the last request may end before the engine
            run_until_killed()
            run_until_killed()
    assert children_of(os.getpid()) == []


# Two processes start, and start again.
@pytest.mark.sweep
def test_searches_choices_and_grammars_end_with_their_stage_too() -> None:
    regex = StructuredOutputsParams(regex="[ab]{2,3000}")
    params = [
        SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.9, seed=1, n=3),
        SamplingParams(max_tokens=3000, temperature=0.0, structured_outputs=regex, ignore_eos=True),
    ]
    with long_running() as llm:
        killing = kill_soon(1)
        outputs = llm.generate(["one", "two"], params, use_tqdm=False)
        killing.join()
        assert {choice.finish_reason for output in outputs for choice in output.outputs} == {"error"}
        short = SamplingParams(max_tokens=8, temperature=0.0)
        assert llm.generate(["one"], short, use_tqdm=False)[0].outputs[0].finish_reason == "length"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    folder = models_zoo.folder("llama-tied", tokenizer=True)
    socket = str(tmp_path / "server.sock")
    program = str(Path(sys.executable).with_name("tidewheel"))
    backend = ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"]
    command = [program, "serve", str(folder), "--device", "cpu", "--max-model-len", "64", "--uds", socket, *backend]
    command += ["--served-model-name", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path)
    try:
        yield process, socket
    finally:
        process.kill()
        process.communicate()


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_leaves_no_process(server: tuple[subprocess.Popen[bytes], str], number: signal.Signals) -> None:
    process, socket = server
    wait_until(lambda: is_serving(socket) or process.poll() is not None)
    stages = children_of(process.pid)
    assert len(stages) == 2
    process.send_signal(number)
    process.wait(60)
    wait_until(lambda: not any(Path(f"/proc/{stage}").exists() for stage in stages))


# A server starts, and its two stages start twice.
def test_a_server_whose_stage_ends_goes_on_serving(server: tuple[subprocess.Popen[bytes], str]) -> None:
    process, socket = server
    wait_until(lambda: is_serving(socket) or process.poll() is not None)
    before = children_of(process.pid)
    os.kill(before[1], signal.SIGKILL)
    body = b'{"model": "tiny", "prompt": [5, 6], "max_tokens": 3}'
    wait_until(lambda: curl(socket, "/v1/completions", body) == 200)
    wait_until(lambda: not {*children_of(process.pid)} & {*before})
    assert curl(socket, "/v1/completions", body) == 200
    after = children_of(process.pid)
    os.kill(after[0], signal.SIGKILL)
    process.terminate()  # while they start again
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    wait_until(lambda: not any(Path(f"/proc/{stage}").exists() for stage in after))
    assert b"pipeline stage 2 of 2 (layer 1) was killed by SIGKILL" in said


def is_serving(socket: str) -> bool:
    return curl(socket, "/health") == 200


def curl(path: str, url: str, body: bytes | None = None) -> int:
    """The status of an answer over a Unix socket; 0 for none."""
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = sockets.socket(sockets.AF_UNIX)
    try:
        connection.sock.connect(path)
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request("POST" if body else "GET", url, body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
