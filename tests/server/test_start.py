"""Starting the real command: what it loads, and how it says that it cannot start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from server.conftest import TIDEWHEEL, is_healthy

# Dumps the names of all modules when it is signalled, so that a running server can be looked into.
OBSERVED = """
import signal, sys
def dump(*_):
    with open(sys.argv[1] + ".part", "w") as file:
        file.write("\\n".join(sys.modules))
    __import__("os").replace(sys.argv[1] + ".part", sys.argv[1])
signal.signal(signal.SIGUSR1, dump)
from tidewheel.server.cli import main
sys.exit(main(sys.argv[2:]))
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
    loaded = {name.partition(".")[0] for name in modules.read_text().split()}
    assert "tidewheel" in loaded
    assert not loaded & {"torch", "transformers", "huggingface_hub", "jax", "onnxruntime", "pydantic"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such-folder/anywhere"], "no/such-folder/anywhere"),
        (["--embedding-model", "no/such-folder/either"], "no/such-folder/either"),
        (["--chat-template", "missing.jinja"], "missing.jinja"),
        (["--generation-config", "missing-folder"], "missing-folder"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
    ],
)
def test_options_that_cannot_be_used(arguments: list[str], said: str) -> None:
    assert said in _failure(*arguments)


def test_a_template_that_does_not_compile(dummy_model: Path) -> None:
    arguments = (str(dummy_model), "--load-format", "dummy", "--chat-template", "{% if %}")
    assert "the chat template does not compile" in _failure(*arguments)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "config.json"),
        ("config.json", b'{"model_type": "abacus", "architectures": ["AbacusForCausalLM"]}', "LlamaForCausalLM"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
        ("model.safetensors", None, "safetensors"),
        ("model.safetensors", b"", "safetensors"),
        ("model.safetensors", b"\xff" * 64, "safetensors"),
        ("model.safetensors", b"\x40" + bytes(7) + b"{" * 3, "safetensors"),
    ],
)
def test_a_folder_that_is_broken(
    dummy_model: Path, tmp_path: Path, name: str, content: bytes | None, said: str
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
    assert said in _failure(str(folder), "--load-format", load_format)


def _failure(*arguments: str) -> str:
    """What a start that fails says: one line, without a traceback, and exit code 1."""
    done = subprocess.run(
        [*TIDEWHEEL, "serve", "--port", "0", "--log-level", "error", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("tidewheel serve: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def _until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
