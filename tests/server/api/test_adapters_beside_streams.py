"""Streams go on, token for token, while large adapters are loaded and swapped beside them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import lora_files
import numpy as np
import pytest
from samples import swept
from server.conftest import ServerProcess
from server.waiting import eventually

_LAYERS, _HIDDEN, _RANK = 8, 128, 256
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": _HIDDEN, "intermediate_size": 256,
    "num_hidden_layers": _LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
_PROMPT = list(range(40, 75))
_SIZES = {"q_proj": (_HIDDEN, _HIDDEN), "o_proj": (_HIDDEN, _HIDDEN)}
_SIZES |= {"gate_proj": (256, _HIDDEN), "up_proj": (256, _HIDDEN), "down_proj": (_HIDDEN, 256)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, dummy_model: Path) -> Path:
    """A model, and adapters of 10 MB."""
    root = tmp_path_factory.mktemp("beside-streams")
    (root / "model").mkdir()
    for file in dummy_model.iterdir():
        (root / "model" / file.name).write_bytes(file.read_bytes())
    (root / "model" / "config.json").write_text(json.dumps(_CONFIG))
    for seed in range(4):
        folder = lora_files.write(root / f"seed-{seed}", _tensors(seed), target_modules=list(_SIZES))
        assert (folder / "adapter_model.safetensors").stat().st_size > 10_000_000
    return root


def _tensors(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    found = {}
    for layer in range(_LAYERS):
        for module, (outputs, inputs) in _SIZES.items():
            part = "mlp" if module.endswith(("gate_proj", "up_proj", "down_proj")) else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            found[f"{name}.lora_A.weight"] = random.standard_normal((_RANK, inputs), np.float32) * 0.05
            found[f"{name}.lora_B.weight"] = random.standard_normal((outputs, _RANK), np.float32) * 0.05
    return found


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    """Two adapters in memory, both in one step."""
    process = ServerProcess(
        *(str(root / "model"), "--load-format", "dummy", "--served-model-name", "base", "--enable-lora"),
        *("--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", str(_RANK), "--kv-cache-space", "0.5"),
        *("--lora-modules", *(f"{name}={root / f'seed-{seed}'}" for seed, name in enumerate(["one", "two", "three"]))),
        "--allow-runtime-lora-updating",
    )
    yield process
    process.stop()


class Stream:
    """An endless answer, read in a thread. `seen` are its tokens and what `note` adds, in the order they came in."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self.seen: list[int | str] = []
        self._has_enough = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server.url, model))
        self._thread.start()
        eventually(lambda: len(self.seen) > 5, "the stream has begun")

    @property
    def tokens(self) -> list[int]:
        return [token for token in self.seen if isinstance(token, int)]

    def note(self, what: str) -> None:
        self.seen.append(what)

    def end(self) -> None:
        """Reads a few tokens more, and goes away."""
        at_least = len(self.seen) + 5
        eventually(lambda: len(self.seen) >= at_least, "the stream goes on")
        self._has_enough.set()
        self._thread.join()

    def between(self, begin: str, end: str) -> int:
        """How many tokens came between two notes."""
        return self.seen.index(end) - self.seen.index(begin) - 1

    def _read(self, url: str, model: str) -> None:
        body = {**_body(model, 30000), "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if self._has_enough.is_set():
                    return
                if line.startswith("data: {"):
                    self.seen += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]


def _body(model: str, max_tokens: int) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": model, "prompt": _PROMPT, "max_tokens": max_tokens, **fields}


def complete(server: ServerProcess, model: str, max_tokens: int) -> list[int]:
    response = httpx.post(f"{server.url}/v1/completions", json=_body(model, max_tokens), timeout=120)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def check_beside(server: ServerProcess, model: str, works: dict[str, Callable[[], object]]) -> None:
    stream = Stream(server, model)
    for name, work in works.items():
        stream.note(f"{name} begins")
        work()
        stream.note(f"{name} ends")
    stream.end()
    for name in works:
        assert stream.between(f"{name} begins", f"{name} ends") > 0, name
    assert stream.tokens == complete(server, model, len(stream.tokens))


@pytest.mark.parametrize("model", ["base", swept("one")])
def test_a_stream_goes_on_while_an_adapter_is_loaded(server: ServerProcess, root: Path, model: str) -> None:
    def update(what: str, **body: Any) -> None:
        response = httpx.post(f"{server.url}/v1/{what}_lora_adapter", json={"lora_name": "new", **body}, timeout=60)
        assert response.status_code == 200, response.text

    def load() -> None:
        update("load", lora_path=str(root / "seed-3"))

    def load_in_place() -> None:
        update("load", lora_path=str(root / "seed-2"), load_inplace=True)

    check_beside(server, model, {"load": load, "load in place": load_in_place})
    update("unload")


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["base", "one"])
def test_a_stream_goes_on_while_adapters_are_swapped(server: ServerProcess, model: str) -> None:
    alone = {name: complete(server, name, 4) for name in ("two", "three")}

    def swap(name: str) -> None:
        assert complete(server, name, 4) == alone[name]

    check_beside(server, model, {f"{turn} {name}": lambda name=name: swap(name) for turn in range(2) for name in alone})


def test_an_adapter_that_is_unloaded_ends_no_stream(server: ServerProcess, root: Path) -> None:
    def unload() -> None:
        response = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "mine"}, timeout=60)
        assert response.status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", json=_body("mine", 1), timeout=60).status_code == 404

    def load_again() -> None:
        body = {"lora_name": "mine", "lora_path": str(root / "seed-2")}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200

    body = {"lora_name": "mine", "lora_path": str(root / "seed-3")}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    stream = Stream(server, "mine")
    unload()
    load_again()  # another one under its name, while the first is in use
    stream.end()
    others = complete(server, "mine", len(stream.tokens))
    unload()
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    assert stream.tokens == complete(server, "mine", len(stream.tokens)) != others
    unload()
