"""curl: commands of the documentation, and of tutorials for OpenAI's, Ollama's, vLLM's and llama.cpp's servers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import lora_files
import pytest
import tokenizers
from cores import one_core
from server.conftest import ServerProcess
from system_tools import require

from tidewheel.server.options.model import DEMO_MODEL

ROOT = Path(__file__).parents[2]
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def commands_of(page: Path) -> Iterator[str]:
    """All that begins with curl in the page's shell blocks, to the end of its last quote."""
    for block in SHELL_BLOCK.findall(page.read_text("utf-8")):
        lines = iter(block.replace("\\\n", " ").splitlines())
        for command in lines:
            if command.startswith("curl "):
                while not is_whole(command):
                    command += "\n" + next(lines)
                yield command


def is_whole(command: str) -> bool:
    try:
        return bool(shlex.split(command))
    except ValueError:  # a quote is open
        return False


PAGES = sorted(page for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")) if any(commands_of(page)))
# These need more than the built-in model: marks of a hole, adapters, and models for embeddings and rankings.
ON_ANOTHER_MODEL = {"clients.md", "lora.md", "models.md", "pooling.md"}


@pytest.fixture(scope="module")
def curl() -> str:
    return require("curl")


@pytest.fixture(scope="module")
def everything(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A model with all that the documentation's commands ask for, and the folder of its adapters."""
    folder = tmp_path_factory.mktemp("everything")
    for path in dummy_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    adapters = folder / "adapters"
    for seed, name in enumerate(("poems", "law")):
        lora_files.write(adapters / name, lora_files.tensors(seed))
    process = ServerProcess(
        *(str(folder), "--load-format", "dummy", "--kv-cache-space", "0.05", "--threads-bind", one_core()),
        *("--enable-lora", "--lora-modules", f"poems={adapters / 'poems'}", "--allow-runtime-lora-updating"),
        *("--embedding-model", str(zoo.folder("bert")), str(zoo.folder("bert-cross"))),
        *("--served-embedding-model-name", "minilm", "reranker"),
    )
    yield process, adapters
    process.stop()


@pytest.fixture
def folder_of_models(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of a folder with the model that docs/many-models.md asks for."""
    shutil.copytree(DEMO_MODEL, tmp_path / "qwen3-8b-Q4_K_M")
    process = ServerProcess("--models-dir", str(tmp_path), "--kv-cache-space", "0.05", "--threads-bind", one_core())
    yield process
    process.stop()


def run(curl: str, command: str) -> str:
    """What a command prints. It fails where the server refuses."""
    options = "--silent --show-error --fail-with-body --noproxy '*' --max-time 60"
    line = command.replace("curl ", f"{curl} {options} ", 1)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


# One takes seconds: it makes models for embeddings, which imports torch.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_documentations_commands(page: Path, curl: str, request: pytest.FixtureRequest) -> None:
    server, adapters = request.getfixturevalue("demo_server"), None
    if page.name in ON_ANOTHER_MODEL:
        server, adapters = request.getfixturevalue("everything")
    if page.name == "many-models.md":
        server = request.getfixturevalue("folder_of_models")
    if page.name == "structured-output.md":
        pytest.importorskip("llguidance")  # not there on every machine
    for command in commands_of(page):
        here = re.sub(r"http://(127\.0\.0\.1|localhost):8000", server.url, command).replace(
            "/adapters/", f"{adapters}/"
        )
        assert server.url in here, command
        assert run(curl, here), command


CHAT = '"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0'
MODEL = '"model": "tidewheel-demo"'


@pytest.mark.parametrize(
    "command",
    [
        f"curl $URL/v1/chat/completions -d '{{{MODEL}, {CHAT}}}'",  # which calls it a form
        f"curl $URL/v1/chat/completions --json '{{{MODEL}, {CHAT}}}'",
        f"echo '{{{MODEL}, {CHAT}}}' | curl -X POST $URL/v1/chat/completions -H 'Content-Type: application/json' -d @-",
        f"curl $URL/v1/chat/completions -H 'Authorization: Bearer '$NO_KEY -H 'Content-Type: application/json' "
        f"-d '{{{MODEL}, {CHAT}}}'",
        f"curl --http1.0 $URL/v1/chat/completions --json '{{{MODEL}, {CHAT}}}'",
        f"curl -H 'Expect: 100-continue' --compressed $URL/v1/chat/completions --json '{{{MODEL}, {CHAT}}}'",
    ],
)
def test_ways_to_send_a_body(command: str, curl: str, demo_server: ServerProcess) -> None:
    answer = json.loads(run(curl, command.replace("$URL", demo_server.url)))
    assert "Tidewheel" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("command", "field", "value"),
    [
        ("curl $URL/v1/models", "object", "list"),
        (f"""curl $URL/v1/completions -H "Content-Type: application/json" -d '{{{MODEL}, "prompt": "San Francisco is a",
            "max_tokens": 7, "temperature": 0}}'""", "object", "text_completion"),
        (f"""curl $URL/v1/responses -H "Content-Type: application/json" -d '{{{MODEL}, "input": "Who are you?",
            "max_output_tokens": 7}}'""", "status", "incomplete"),
        (f"""curl $URL/v1/messages --header "x-api-key: none" --header "anthropic-version: 2023-06-01" --header
            "content-type: application/json" --data '{{{MODEL}, "max_tokens": 7, {CHAT}}}'""", "type", "message"),
        ("curl $URL/api/version", "version", ...),
        ("curl $URL/api/tags", "models", ...),
        (f"""curl $URL/api/generate -d '{{{MODEL}, "prompt": "Why is the sky blue?", "stream": false,
            "options": {{"num_predict": 5}}}}'""", "done_reason", "length"),
        (f"""curl $URL/api/chat -d '{{{MODEL}, {CHAT}, "stream": false}}'""", "done_reason", "stop"),
        ("""curl --request POST --url $URL/completion --header "Content-Type: application/json" --data '{"prompt":
            "Building a website can be done in 10 simple steps:", "n_predict": 5}'""", "stop_type", "limit"),
        ("""curl $URL/tokenize -d '{"prompt": "Who are you?"}'""", "tokens", ...),
        ("curl $URL/health", "status", "ok"),
    ],
)  # fmt: skip
def test_first_commands_of_tutorials(
    command: str, field: str, value: Any, curl: str, demo_server: ServerProcess
) -> None:
    said = run(curl, " ".join(command.replace("$URL", demo_server.url).split("\n")))
    answer = json.loads(said)
    assert answer[field] == value if value is not ... else answer[field]


@pytest.mark.parametrize(
    ("path", "fields", "ending"),
    [
        ("/v1/chat/completions", CHAT, r"data: \[DONE\]"),
        ("/v1/completions", '"prompt": "The tide", "max_tokens": 9', r"data: \[DONE\]"),
        ("/completion", '"prompt": "The tide", "n_predict": 9', r'data: .*"stop":true.*'),
    ],
)
def test_streams(path: str, fields: str, ending: str, curl: str, demo_server: ServerProcess) -> None:
    command = f"curl -N {demo_server.url}{path} --json '{{\"stream\": true, {fields}}}'"
    lines = [line for line in run(curl, command).splitlines() if line]
    assert len(lines) > 1
    assert all(line.startswith("data: ") for line in lines)
    assert re.fullmatch(ending, lines[-1])


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_ollama_streams_unless_it_is_told_not_to(path: str, curl: str, demo_server: ServerProcess) -> None:
    asked = CHAT if path == "/api/chat" else '"prompt": "Why is the sky blue?", "options": {"num_predict": 9}'
    said = run(curl, f"curl {demo_server.url}{path} -d '{{{MODEL}, {asked}}}'")
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
