"""Starting the real command: what it loads, and how it says that it cannot start."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import FORMATS, save
from server.conftest import TIDEWHEEL, RefusedStart, ServerProcess, StartProcess, is_healthy

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.server.options.model import DEMO_MODEL

# Dumps the names of all modules when it is signalled, so that a running server can be looked into.
OBSERVED = """
import signal, sys
def dump(*_):
    with open(sys.argv[1] + ".part", "w") as file:
        file.write("\\n".join(sys.modules))
    __import__("os").replace(sys.argv[1] + ".part", sys.argv[1])
signal.signal(signal.SIGUSR1, dump)
from tidewheel.server.commands.cli import main
sys.exit(main(sys.argv[2:]))
"""

LOADS = "tidewheel.engine.hosting.units"  # what a load tells of itself
GGUF_NAMES = "tidewheel.engine.weights.gguf.choosing"  # what a folder is searched with

# Its device says that it loads, and goes on until it is told to stop.
NEVER_LOADS = """
import sys, threading
from tidewheel.engine.loading import opened_model
from tidewheel.server.commands.cli import main
get_device = opened_model.get_device
def get_stuck_device(*chosen):
    device = get_device(*chosen)
    def load(spec, weights, options, cancellation):
        cancelled = threading.Event()
        with cancellation.calling(cancelled.set):
            print("loading", flush=True)
            cancelled.wait()
        cancellation.check()
    device.load = load
    return device
opened_model.get_device = get_stuck_device
sys.exit(main(sys.argv[1:]))
"""


def test_serving_on_the_cpu_imports_neither_torch_nor_transformers(
    dummy_model: Path, tmp_path: Path, unused_port: int
) -> None:
    modules = tmp_path / "modules"
    serve = ["serve", str(dummy_model), "--load-format", "dummy", "--device", "cpu", "--port", str(unused_port)]
    process = subprocess.Popen([sys.executable, "-c", OBSERVED, str(modules), *serve], cwd=tmp_path)
    try:
        base = f"http://127.0.0.1:{unused_port}"
        _until(lambda: is_healthy(base), process)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert httpx.post(f"{base}/v1/chat/completions", json=body, trust_env=False).status_code == 200
        assert httpx.get(f"{base}/metrics", trust_env=False).status_code == 200
        process.send_signal(signal.SIGUSR1)
        _until(modules.exists, process)
    finally:
        process.kill()
        process.wait()
    loaded = set(modules.read_text().split())
    packages = {name.partition(".")[0] for name in loaded}
    assert "tidewheel" in packages
    assert not packages & {"torch", "transformers", "huggingface_hub", "jax", "onnxruntime", "pydantic"}
    # Nor what other models need: this one is a Llama, in a folder, and not quantized.
    assert not {name for name in loaded if name.startswith("tidewheel.engine.weights.gguf.")} - {GGUF_NAMES}
    assert "tidewheel.engine.models.families.llama" in loaded
    assert not loaded & {"tidewheel.engine.models.families.mamba2", "tidewheel.engine.weights.quantized.gptq"}
    # Nor what only several models need.
    assert not {name for name in loaded if ".hosting." in name or name.endswith(".model_sections")} - {LOADS}


def test_the_model_is_looked_for_before_the_server_is_imported() -> None:
    listing = "import sys, tidewheel.server.commands.serve; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True).stdout.split())
    assert "tidewheel.engine.loading.load" in loaded
    packages = {"asyncio", "jinja2", "llguidance", "orjson", "prometheus_client", "starlette", "tokenizers", "uvicorn"}
    assert not loaded & packages
    # What the weights are read with is all there is of the engine.
    assert not loaded & {f"tidewheel.engine.{name}" for name in ("constraints", "core.engine", "scheduling", "text")}
    assert not {name for name in loaded if name.startswith("tidewheel.server.protocol")}


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not say what a process has loaded")
def test_an_idle_server_prepares_for_structured_output(start_process: StartProcess) -> None:
    pytest.importorskip("llguidance")
    server = start_process()
    loaded = Path(f"/proc/{server.process.pid}/maps")
    _until(lambda: "llguidance" in loaded.read_text(), server.process)
    body = {"prompt": "SAY(ebb)YAS", "guided_choice": ["ebb", "flood"]}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "ebb"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such-folder/anywhere"], "no/such-folder/anywhere"),
        (["--embedding-model", "no/such-folder/either"], "no/such-folder/either"),
        (["--chat-template", "missing.jinja"], "--chat-template: there is no file missing.jinja"),
        (["no/such-folder/anywhere", "--chat-template", "missing.jinja"], "missing.jinja"),
        (["--generation-config", "missing-folder"], "missing-folder"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--models-dir", "no/such-folder"], "--models-dir no/such-folder cannot be read"),
        (["--threads-bind", "999999"], "--threads-bind"),  # which the weights' thread finds out
    ],
)
def test_options_that_cannot_be_used(failure: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in failure(*arguments)


def test_a_start_that_fails_ends_its_process() -> None:
    command = [*TIDEWHEEL, "serve", "--port", "0", "--threads-bind", "999999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("tidewheel serve: ")
    assert "--threads-bind" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_template_that_does_not_compile(failure: Callable[..., str], dummy_model: Path) -> None:
    arguments = (str(dummy_model), "--load-format", "dummy", "--chat-template", "{% if %}")
    assert "the chat template does not compile" in failure(*arguments)


def test_a_bad_tokenizer_is_said_before_the_weights_are_loaded(tmp_path: Path) -> None:
    with _start_that_never_loads(tmp_path, "--tokenizer", ".") as process:
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert log.startswith("tidewheel serve: . has no tokenizer")
    assert log.count("\n") == 1


def test_ctrl_c_ends_a_start_that_loads(tmp_path: Path) -> None:
    with _start_that_never_loads(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        try:
            _, log = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:  # Python drops an exception of a callback, and says so: it may be this one
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in log.partition("Exception ignored in")[0]
    assert "_shutdown" not in log  # no thread was left to wait for


def test_a_taken_port_is_known_before_the_model_is_looked_for(failure: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in failure("no/such-folder", "--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "config.json"),
        ("config.json", b'{"model_type": "abacus", "architectures": ["AbacusForCausalLM"]}', "AbacusForCausalLM"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("model.safetensors", None, "safetensors"),
        ("model.safetensors", b"", "safetensors"),
        ("model.safetensors", b"\xff" * 64, "safetensors"),
        ("model.safetensors", b"\x40" + bytes(7) + b"{" * 3, "safetensors"),
    ],
)
def test_a_folder_that_is_broken(
    failure: Callable[..., str], dummy_model: Path, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(dummy_model, folder)
    if content is None:
        (folder / name).unlink(missing_ok=True)
        if name == "tokenizer.json":
            (folder / "tokenizer_config.json").unlink()
    else:
        (folder / name).write_bytes(content)
    load_format = "auto" if name == "model.safetensors" else "dummy"
    assert said in failure(str(folder), "--load-format", load_format)


def test_huge_pages_are_asked_for_and_the_log_says_so(demo_server: ServerProcess) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists():
        assert "lie in small pages (transparent huge pages: not supported)" in demo_server.log
        return
    mode = enabled.read_text().partition("[")[2].partition("]")[0]
    pages = "small pages" if mode == "never" else "huge pages where the kernel has any"
    assert f"Weights and KV cache lie in {pages} (transparent huge pages: {mode})" in demo_server.log
    kv_cache = re.search(r"KV cache ([\d.]+) GiB", demo_server.log)
    assert kv_cache is not None
    mappings = Path(f"/proc/{demo_server.process.pid}/smaps").read_text().split("VmFlags:")
    asked = [
        int(size[1]) * 1024
        for mapping, following in itertools.pairwise(mappings)
        if "hg" in following.partition("\n")[0].split() and (size := re.search(r"^Size: +(\d+) kB$", mapping, re.M))
    ]
    weights = (DEMO_MODEL / "model.safetensors").stat().st_size
    assert sum(asked) >= float(kv_cache[1]) * 0.98 * 2**30 + weights


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not say what a process has mapped")
def test_a_quantized_checkpoint_is_unmapped_when_it_is_served(dummy_model: Path, tmp_path: Path) -> None:
    config, random, tensors = json.loads((dummy_model / "config.json").read_text()), np.random.default_rng(0), {}
    description = describe(config)
    for name, shape in tensor_shapes(description.spec).items():
        stored = description.tensors[name].name
        if name.startswith("layers.") and len(shape) == 2:
            parts, _ = FORMATS["gptq-4"].make(random, *shape)
            tensors |= {stored.removesuffix("weight") + part: array for part, array in parts.items()}
        else:
            tensors[stored] = random.standard_normal(shape, np.float32)
    save(tmp_path, {**config, "quantization_config": FORMATS["gptq-4"].config}, tensors)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(dummy_model / file, tmp_path)
    server = ServerProcess(str(tmp_path))
    try:
        assert "4 bits in groups of 32" in server.log
        assert ".safetensors" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    finally:
        server.stop()


@contextlib.contextmanager
def _start_that_never_loads(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", NEVER_LOADS, "serve", "--port", "0", "--log-level", "error", *arguments],
        cwd=folder,  # Python looks for modules there first: not among the sources, which have no extension
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def failure(refused_start: RefusedStart, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Gives what a start that fails says: one line, without a traceback, and exit code 1."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*arguments: str) -> str:
        code, said = refused_start(*arguments)
        assert code == 1, said
        assert said.startswith("tidewheel serve: ")
        assert said.count("\n") == 1, said
        return said

    return run


def _until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
