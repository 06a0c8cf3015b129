"""Servers for the tests: in this process with a scripted engine, and the real command with a real model."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers
import uvicorn
from cores import one_core
from ports import free_port
from server.processes import ScriptedProcess
from server.scripted_engine import ScriptedEngine

import tidewheel
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.media.options import MediaOptions
from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.commands import serve
from tidewheel.server.commands.cli import main
from tidewheel.server.encoder_app import build_encoder_app
from tidewheel.server.http.connections import connection_class
from tidewheel.server.http.limits import ConnectionLimits

if TYPE_CHECKING:
    import openai

# The file and not `-m tidewheel`, which would take the package from the current folder, installed or not.
TIDEWHEEL = [sys.executable, str(Path(tidewheel.__file__).with_name("__main__.py"))]


@dataclass
class RunningServer:
    """A server in this process. `http` talks to it over a real socket."""

    engine: Any  # a ScriptedEngine, unless it was given
    port: int
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def another_client(self) -> httpx.Client:
        """What talks to it from another address than `http`."""
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        return httpx.Client(base_url=self.url, timeout=60, transport=transport)


StartServer = Callable[..., RunningServer]
StartProcess = Callable[..., ScriptedProcess]
RefusedStart = Callable[..., tuple[int | str | None, str]]


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell that runs the tests in the background has them ignore SIGINT, and so would all that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Starts servers, by the options of AppOptions; all stop when the module's tests are over.

    `engine` is an engine or the options of ScriptedEngine, `encoders` are embedding models to serve too,
    `connections` the options of ConnectionLimits, `media` which images requests may have. Without `chat` there are only
    encoders.
    """
    running: list[tuple[uvicorn.Server, threading.Thread, httpx.Client]] = []

    def start(
        engine: Engine | dict[str, Any] | None = None,
        encoders: EncoderEngine | None = None,
        connections: dict[str, Any] | None = None,
        media: MediaOptions | None = None,
        chat: bool = True,
        **options: Any,
    ) -> RunningServer:
        app_options = AppOptions(**options)
        scripted: Engine | None = None
        if not chat:
            assert encoders is not None
            app = build_encoder_app(encoders, app_options)
        else:
            scripted = engine if isinstance(engine, Engine) else ScriptedEngine(**engine or {})
            app = build_app(scripted, app_options, encoders, media=media)
        protocol = connection_class(ConnectionLimits(**connections or {}), direct_write=not app_options.middleware)
        config = uvicorn.Config(app, port=0, loop="uvloop", http=protocol, ws="none", log_config=None, lifespan="on")
        server = uvicorn.Server(config)
        listener = config.bind_socket()
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=60,
            trust_env=False,
            headers={"content-type": "application/json"},
        )
        running.append((server, thread, client))
        for _ in range(1000):
            if server.started:
                break
            threading.Event().wait(0.01)
        return RunningServer(scripted, port, client)

    yield start
    for server, _, client in running:
        client.close()
        server.should_exit = True
    for _, thread, _ in running:
        thread.join(10)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """A server with default options, shared by the tests that leave it as it was."""
    return start_server()


@pytest.fixture(scope="module")
def parsing_server(start_server: StartServer) -> RunningServer:
    """A server that finds calls and reasoning in what its model says, shared by the tests of SDKs."""
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def client(parsing_server: RunningServer) -> Iterator[openai.OpenAI]:
    """The openai SDK, on the server that parses."""
    import openai  # here, for it takes a second and most tests go without

    with openai.OpenAI(base_url=f"{parsing_server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a complete event stream, which ends with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    frames = response.text.split("\n\n")[:-1]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def named_events(response: httpx.Response) -> list[Any]:
    """The JSON of a complete event stream whose events have names, which are their types."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    payloads = []
    for frame in response.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


def is_healthy(url: str) -> bool:
    """Whether a server answers there, and is well."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def unused_port() -> int:
    """A port that nothing listens on."""
    return free_port()


class ServerProcess:
    """`tidewheel serve`, or another command for it, on a free port, ready to answer. `options` are Popen's."""

    def __init__(self, *arguments: str, command: Sequence[str] = (*TIDEWHEEL, "serve"), **options: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [*command, *arguments, "--port", str(self.port)], stderr=subprocess.PIPE, text=True, **options
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + 120
        while not is_healthy(self.url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.log}")
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What the server has logged."""
        return "".join(self._log)

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)


@pytest.fixture
def start_process() -> Iterator[StartProcess]:
    """Starts scripted processes, by ScriptedProcess' arguments; all are ended in the end."""
    processes: list[ScriptedProcess] = []

    def start(*arguments: str, **options: Any) -> ScriptedProcess:
        processes.append(ScriptedProcess(*arguments, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.stop()


@pytest.fixture
def refused_start(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RefusedStart:
    """Runs `tidewheel serve` in this process, where it fails before it serves: its exit code and what it said."""
    monkeypatch.setattr(serve, "configure_logging", lambda *arguments, **options: None)  # pytest has its own
    monkeypatch.setattr(gc, "freeze", lambda: None)  # what a test leaves is to be collected

    def begin_to_serve(*arguments: object, **options: object) -> None:
        pytest.fail("the start did not fail")

    monkeypatch.setattr(uvicorn.Server, "run", begin_to_serve)

    def run(*arguments: str) -> tuple[int | str | None, str]:
        capfd.readouterr()
        try:
            code: int | str | None = main(["serve", "--port", "0", *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, capfd.readouterr().err

    return run


@pytest.fixture(scope="session")
def dummy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama's config, a byte-level tokenizer and a ChatML template; its weights are dummies."""
    folder = tmp_path_factory.mktemp("dummy-llama")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": 257, "eos_token_id": 258, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture(scope="session")
def dummy_server(dummy_model: Path) -> Iterator[ServerProcess]:
    """The real command serving dummy weights, with room for descriptions of tools."""
    arguments = ("--load-format", "dummy", "--served-model-name", "tiny", "--api-key", "secret", "--max-num-seqs", "16")
    room = ("--hf-overrides", '{"max_position_embeddings": 2048}')
    process = ServerProcess(str(dummy_model), *arguments, *room, "--threads-bind", one_core())
    yield process
    process.stop()


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """The real command without a model: it serves the embedded one."""
    process = ServerProcess("--threads-bind", one_core())
    yield process
    process.stop()
