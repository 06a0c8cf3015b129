"""LoRA adapters over HTTP: models with a parent, chosen by name, which come and go while others are answered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import lora_files
import numpy as np
import pytest
from cores import one_core
from fake_hub import Claimed, FakeHub, fake_hub
from server.conftest import RefusedStart, ServerProcess
from server.waiting import eventually

from tidewheel.engine.adapters.options import LoraModule
from tidewheel.server.options.serve import parse_options

PROMPT = list(range(40, 75))  # more than two blocks, which the prefix cache keeps


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(4):
        lora_files.write(root / f"seed-{seed}", lora_files.tensors(seed))
    nan = {name: np.full_like(value, np.nan) for name, value in lora_files.tensors().items()}
    lora_files.write(root / "broken", nan)
    return root


@pytest.fixture(scope="module")
def hub(folders: Path) -> Iterator[FakeHub]:
    adapter = lora_files.contents(folders / "seed-2")
    pickled = {"adapter_config.json": adapter["adapter_config.json"], "adapter_model.bin": b""}
    large = {**adapter, "adapter_model.safetensors": Claimed(adapter["adapter_model.safetensors"])}
    model = {"config.json": b"{}"}
    repositories = {"own/poems": adapter, "own/pickled": pickled, "own/large": large, "own/model": model}
    repositories["own/rhymes"] = lora_files.contents(folders / "seed-1")
    with fake_hub(repositories | {f"own/slow-{i}": adapter for i in range(5)}) as hub:
        yield hub


@pytest.fixture(scope="module")
def server(
    dummy_model: Path, folders: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One adapter a step, two in memory."""
    process = ServerProcess(
        *(str(dummy_model), "--load-format", "dummy", "--served-model-name", "base", "--enable-lora"),
        *("--max-loras", "1", "--max-cpu-loras", "2", "--kv-cache-space", "0.05"),
        *("--threads-bind", one_core(), "--lora-modules", f"first={folders / 'seed-0'}"),
        '{"name": "second", "path": "own/rhymes", "base_model_name": "llama"}',
        *("--allow-runtime-lora-updating", "--lora-resolver-cache-dir", str(folders)),
        env=hub.environment(tmp_path_factory.mktemp("hub")),
    )
    yield process
    process.stop()


def complete(server: ServerProcess, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def tokens(server: ServerProcess, model: str) -> list[int]:
    response = complete(server, model)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def update(server: ServerProcess, what: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=body, timeout=60)


def test_adapters_are_models_with_a_parent(server: ServerProcess) -> None:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards[:3]] == [
        ("base", None),
        ("first", "base"),
        ("second", "llama"),
    ]
    assert httpx.get(f"{server.url}/v1/models/first").json()["parent"] == "base"
    modules = httpx.get(f"{server.url}/server_info").json()["options"]["lora_modules"]
    assert [module["name"] for module in modules] == ["first", "second"]


def test_each_name_has_its_own_answers(server: ServerProcess) -> None:
    answers = {model: tokens(server, model) for model in ("base", "first", "second", "seed-2", "seed-3")}
    assert len({tuple(answer) for answer in answers.values()}) == 5
    assert (tokens(server, "seed-0"), tokens(server, "seed-1")) == (answers["first"], answers["second"])
    # More adapters than fit into memory, and one a step: all of them wait, none is mixed up.
    models = [*answers, *answers, *answers]
    with ThreadPoolExecutor(len(models)) as pool:
        found = list(pool.map(lambda model: tokens(server, model), models))
    assert found == [answers[model] for model in models]


def test_chats_have_adapters_too(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "tide"}], "max_tokens": 8, "temperature": 0}
    texts = set()
    for model in ("base", "first", "second"):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "model": model}, timeout=60).json()
        assert answer["model"] == model
        texts.add(answer["choices"][0]["message"]["content"])
    assert len(texts) == 3


def test_who_uses_an_adapter_is_in_the_metrics_and_in_the_log(server: ServerProcess) -> None:
    metrics = httpx.Client(base_url=server.url)  # one, as each new one takes a while, and the answer does not

    def used() -> tuple[str, ...]:
        text = metrics.get("/metrics").text
        [line] = re.findall(r"^tidewheel:lora_requests_info\{(.*)\} 1\.\d+e\+09$", text, re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]

    with metrics, ThreadPoolExecutor(1) as pool:
        assert used() == ("1", "", "")
        answer = pool.submit(complete, server, "first", prompt=[PROMPT] * 16, max_tokens=400, ignore_eos=True)
        eventually(lambda: used() == ("1", "first", ""), "the adapter should be at work")
        assert answer.result().status_code == 200
        assert used() == ("1", "", "")
    assert f" adapter=first prompt={16 * len(PROMPT)} " in server.log


@pytest.mark.parametrize("name", ["nobody", "../seed-0", ".", "..", "seed-0/../seed-1", "/etc", "a\0b", "x" * 300])
def test_unknown_models_are_not_found(server: ServerProcess, name: str) -> None:
    response = complete(server, name)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_an_adapter_that_cannot_be_read_is_an_error_in_one_sentence(server: ServerProcess) -> None:
    response = complete(server, "broken")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "model")
    assert error["message"].startswith("the adapter 'broken' cannot be loaded: ")
    assert "not finite" in error["message"]
    assert tokens(server, "base")


def test_adapters_come_and_go(server: ServerProcess, folders: Path) -> None:
    path = str(folders / "seed-2")
    assert update(server, "load", lora_name="new", lora_path=path).text.startswith("Success")
    assert tokens(server, "new") == tokens(server, "seed-2")
    again = update(server, "load", lora_name="new", lora_path=path)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    replaced = update(server, "load", lora_name="new", lora_path=str(folders / "seed-3"), load_inplace=True)
    assert replaced.status_code == 200
    assert tokens(server, "new") == tokens(server, "seed-3")
    assert update(server, "unload", lora_name="new").text.startswith("Success")
    assert complete(server, "new").status_code == 404
    assert update(server, "unload", lora_name="new").status_code == 404


def test_an_adapter_may_be_a_gguf_file(server: ServerProcess, dummy_model: Path, folders: Path, tmp_path: Path) -> None:
    import gguf_files
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(dummy_model)
    file = gguf_files.write_adapter(tmp_path / "two.gguf", config, folders / "seed-2")
    assert update(server, "load", lora_name="in-gguf", lora_path=str(file)).text.startswith("Success")
    assert tokens(server, "in-gguf") == tokens(server, "seed-2")
    assert update(server, "unload", lora_name="in-gguf").status_code == 200


def test_an_adapter_of_the_hub_is_downloaded_once(server: ServerProcess, hub: FakeHub) -> None:
    sent = hub.sent["adapter_model.safetensors"]  # of another, at the start
    assert update(server, "load", lora_name="poems", lora_path="own/poems").text.startswith("Success")
    answer = tokens(server, "poems")
    assert answer == tokens(server, "seed-2") != tokens(server, "base")
    for other in ("first", "second", "seed-3"):  # so that it makes way in memory
        tokens(server, other)
    assert tokens(server, "poems") == answer
    assert update(server, "unload", lora_name="poems").status_code == 200
    assert update(server, "load", lora_name="poems", lora_path="own/poems").status_code == 200
    assert update(server, "unload", lora_name="poems").status_code == 200
    size = len(hub.repositories["own/poems"]["adapter_model.safetensors"])
    assert hub.sent["adapter_model.safetensors"] == sent + size


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("own/nobody", "own/nobody is neither a folder here nor a model at"),
        ("own/gated", "own/gated is gated: accept its terms"),
        ("own/model", "own/model has no adapter: neither adapter_config.json nor a GGUF file"),
        ("own/pickled", "adapter_model.bin is a pickle"),
        ("own/large", "own/large: the adapter has 1048576.00 GiB, and at most 8 GiB are downloaded"),
        ("what is this?", "neither a folder nor a hub id such as owner/name"),
        ("own/poems:", "names no quantization after the colon"),
        ("own/po\nems", "lora_path must have only printable characters, got 'own/po\\nems'"),
        ("own/" + "x" * 10_000, "lora_path must have at most 4096 characters"),
    ],
)
def test_what_the_hub_has_not_is_refused(server: ServerProcess, path: str, words: str) -> None:
    response = update(server, "load", lora_name="other", lora_path=path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path")
    assert words in response.json()["error"]["message"]


def test_downloads_stop_no_answers_and_are_bounded(server: ServerProcess, hub: FakeHub) -> None:
    hub.may_send.clear()
    with ThreadPoolExecutor(5) as pool:
        names = [f"slow-{i}" for i in range(5)]
        loads = [pool.submit(update, server, "load", lora_name=name, lora_path=f"own/{name}") for name in names]
        refused = next(as_completed(loads)).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_downloads")
        assert "retry-after" in refused.headers
        assert tokens(server, "base")
        assert tokens(server, "seed-3")  # whose files are read meanwhile
        hub.may_send.set()
    assert sorted(load.result().status_code for load in loads) == [200] * 4 + [429]
    for name, load in zip(names, loads, strict=True):
        assert update(server, "unload", lora_name=name).status_code == (200 if load.result().is_success else 404)


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("base", "seed-0", "names a model already"),
        ("other", "broken", "not finite"),
        ("other", "nowhere", "nowhere does not exist"),
        ("other", "n" * 300, "cannot be read: File name too long"),
        ("", "seed-0", "must not be empty"),
        ("a" * 257, "seed-0", "lora_name must have at most 256 characters"),
        ("a\nERROR forged", "seed-0", "lora_name must have only printable characters"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    server: ServerProcess, folders: Path, name: str, path: str, words: str
) -> None:
    response = update(server, "load", lora_name=name, lora_path=str(folders / path))
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_server_that_was_not_told_to_loads_nothing(dummy_server: ServerProcess) -> None:
    body = {"lora_name": "a", "lora_path": "/a"}
    headers = {"authorization": "Bearer secret"}
    response = httpx.post(f"{dummy_server.url}/v1/load_lora_adapter", json=body, headers=headers)
    assert response.status_code == 403
    assert "--allow-runtime-lora-updating" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "must be NAME=PATH"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "must be NAME=PATH or a JSON object"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "two adapters have the same name"),
        (["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "2"], "must be at least --max-loras 4"),
        (["--enable-lora", "--max-lora-rank", "513"], "must be between 1 and 512"),
        (["--enable-lora", "--lora-extra-vocab-size", "8"], "adapters that add tokens are refused"),
        (["--enable-lora", "--long-lora-scaling-factors", "4.0,many"], "must be numbers with commas between them"),
        (["--enable-lora", "--long-lora-scaling-factors", "0.5"], "must be between 1 and 1024"),
        (["--enable-lora", "--long-lora-scaling-factors", "nan"], "must be between 1 and 1024"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["model", *arguments], {})
    assert words in capsys.readouterr().err


def test_flags_without_effect_are_named() -> None:
    def said(*arguments: str) -> list[str]:
        lora = parse_options(["model", *arguments], {}).engine.lora
        return [line.partition(" has no effect")[0] for line in lora.without_effect()]

    assert said("--enable-lora", "--max-loras", "4") == []
    given = ["--fully-sharded-loras", "--lora-extra-vocab-size", "256"]
    assert said("--enable-lora", *given) == ["--fully-sharded-loras", "--lora-extra-vocab-size"]
    assert said("--max-loras", "4") == ["--max-loras"]
    defaults = ["--max-loras", "1", "--lora-dtype", "auto", "--no-fully-sharded-loras"]
    assert said(*defaults) == ["--fully-sharded-loras", "--max-loras", "--lora-dtype"]
    assert said("--long-lora-scaling-factors", "4") == ["--long-lora-scaling-factors"]


@pytest.mark.parametrize("given", [["4.0,8"], ["4", "8.0"]])
def test_factors_of_long_contexts_may_be_written_as_in_vllm(given: list[str]) -> None:
    lora = parse_options(["model", "--enable-lora", "--long-lora-scaling-factors", *given], {}).engine.lora
    assert lora.long_lora_scaling_factors == (4.0, 8.0)


def test_modules_may_be_a_json_list_in_the_environment() -> None:
    modules = '[{"name": "a", "path": "b"}, {"name": "c", "path": "d", "base_model_name": "e"}]'
    variables = {"TIDEWHEEL_LORA_MODULES": modules, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    lora = parse_options(["model", "--enable-lora"], variables).engine.lora
    assert lora.lora_modules == (LoraModule("a", "b"), LoraModule("c", "d", "e"))
    assert lora.allow_runtime_lora_updating


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-modules", "a=/nowhere"], "/nowhere does not exist"),
        (["--lora-resolver-cache-dir", "/nowhere"], "--lora-resolver-cache-dir /nowhere does not exist: name the"),
        (
            ["--device", "graph-cpu", "--tensor-parallel-size", "2"],
            "the graph-cpu device has no LoRA adapters: drop --enable-lora or take --device cpu",
        ),
    ],
)
def test_what_cannot_be_served_ends_the_start(
    refused_start: RefusedStart,
    monkeypatch: pytest.MonkeyPatch,
    dummy_model: Path,
    arguments: list[str],
    words: str,
) -> None:
    if "tpu" in arguments:
        pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = (str(dummy_model), "--load-format", "dummy", "--kv-cache-space", "0.05", "--enable-lora")
    code, said = refused_start(*given, *arguments)
    assert code != 0
    assert words in said
    assert "Traceback" not in said
