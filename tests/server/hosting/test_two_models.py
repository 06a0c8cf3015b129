"""Two models behind one address: a request's model answers it, and is loaded for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from cores import one_core
from server.conftest import ServerProcess
from server.hosting.conftest import HostServer, StartHost

from tidewheel.server.openapi.document import declared

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def host(start_host: StartHost, dummy_model: Path, other_model: Path) -> HostServer:
    return start_host("--model", f"one={dummy_model}", "--model", f"two={other_model}", "--load-format", "dummy")


def ask(host: HostServer, model: str | None, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}
    return host.http.post(CHAT, json=body if model is None else {"model": model, **body})


def sizes(host: HostServer) -> dict[str, int]:
    return {card["id"]: card["size"] for card in host.http.get("/v1/models").json()["data"]}


def states(host: HostServer) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in host.http.get("/v1/models").json()["data"]}


def test_a_model_is_loaded_when_a_request_names_it(start_host: StartHost, dummy_model: Path, other_model: Path) -> None:
    host = start_host("--model", f"one={dummy_model}", "--model", f"two={other_model}", "--load-format", "dummy")
    assert states(host) == {"one": "unloaded", "two": "unloaded"}
    answer = ask(host, "two")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "two"


def test_a_request_without_a_model_goes_to_the_first(host: HostServer) -> None:
    assert ask(host, None).json()["model"] == "one"


def test_a_name_that_nothing_has_is_refused_with_those_there_are(host: HostServer) -> None:
    answer = ask(host, "three")
    assert answer.status_code == 404
    assert "one, two" in answer.json()["error"]["message"]


def test_metrics_of_all_models_are_told_apart_by_their_names(host: HostServer) -> None:
    for name in ("one", "two"):
        assert ask(host, name).status_code == 200
    text = host.http.get("/metrics").text
    assert text.count("# TYPE tidewheel:num_requests_running gauge") == 1
    for name in ("one", "two"):
        assert f'tidewheel:num_requests_running{{model_name="{name}"}} 0.0' in text


def test_the_openai_sdk_talks_to_both(host: HostServer) -> None:
    import openai  # here, for it takes a second and most tests go without

    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0) as sdk:
        assert [model.id for model in sdk.models.list()] == ["one", "two"]
        for name in ("two", "one"):
            messages: Any = [{"role": "user", "content": "Hello"}]
            whole = sdk.chat.completions.create(model=name, messages=messages, max_tokens=4, temperature=0)
            chunks = list(
                sdk.chat.completions.create(model=name, messages=messages, max_tokens=4, temperature=0, stream=True)
            )
            assert {chunk.model for chunk in chunks} == {whole.model} == {name}
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="three"):
            sdk.chat.completions.create(model="three", messages=messages)


def test_what_is_loaded_tells_of_itself_and_the_server_of_all(
    start_host: StartHost, dummy_model: Path, other_model: Path
) -> None:
    models = ("--model", f"one={dummy_model}", "--model", f"two={other_model}")
    host = start_host(*models, "--load-format", "dummy", "--admin-api-key", "boss")
    keyed = {"authorization": "Bearer boss"}
    assert host.http.get("/v1/models").status_code == 401
    assert host.http.get("/health").json() == {"status": "ok", "ready": []}
    for path in ("/health", "/load", "/server_info"):
        unloaded = host.http.get(path, params={"model": "one"}, headers=keyed)
        assert unloaded.status_code == 503, path
        assert unloaded.json()["error"]["code"] == "model_not_loaded"
    assert host.http.post("/reset_prefix_cache?model=one", headers=keyed).status_code == 200  # which loads it
    assert host.http.get("/health").json()["ready"] == ["one"]
    assert host.http.get("/health?model=one").json() == {"status": "ok"}
    assert host.http.get("/load").json()["server_load"] == 0
    own = host.http.get("/server_info?model=one", headers=keyed).json()
    assert own["max_model_len"] == 512
    of_all = host.http.get("/server_info", headers=keyed).json()
    assert of_all["models"] == {"one": "loaded", "two": "unloaded"}
    lines = host.http.get("/metrics").text.splitlines()
    memory = [line for line in lines if line.startswith("tidewheel:model_memory_bytes{")]
    assert [line.partition("} ")[0].partition("{")[2] for line in memory] == [
        'kind="weights",model_name="one"', 'kind="kv_cache",model_name="one"',
    ]  # fmt: skip
    assert sum(float(line.split()[-1]) for line in memory) == of_all["memory_used_bytes"] > 0


def test_the_documents_have_what_models_answer(host: HostServer) -> None:
    paths = host.http.get("/openapi.json").json()["paths"]
    assert {CHAT, "/v1/embeddings", "/v1/responses/{id}", "/v1/models", "/api/chat", "/invocations"} <= paths.keys()


def test_every_path_of_a_model_leads_to_it(host: HostServer) -> None:
    """So that no endpoint of a server with one model is missing on a server of several."""
    assert ask(host, "one").status_code == 200
    loaded = next(iter(host.models.loaded)).models["one"]
    served = {
        (path, method) for path, methods in host.http.get("/openapi.json").json()["paths"].items() for method in methods
    }
    for route in [*loaded.routes, *loaded.status_routes]:
        if declared(route) is not None and not route.path.startswith("/api/"):
            assert all(
                (route.path_format, method.lower()) in served for method in (route.methods or set()) - {"HEAD"}
            ), route


def test_the_size_of_a_model_is_that_of_its_files_until_it_is_loaded(
    start_host: StartHost, dummy_model: Path, other_model: Path
) -> None:
    host = start_host("--model", f"one={dummy_model}", "--model", f"two={other_model}", "--load-format", "dummy")
    files = sum(path.stat().st_size for path in dummy_model.iterdir())
    assert sizes(host) == {"one": files, "two": files}
    assert ask(host, "two").status_code == 200
    assert sizes(host) == {"one": files, "two": host.http.get("/server_info").json()["memory_used_bytes"]}


def test_the_command_ends_with_its_answers_given_and_nothing_left(dummy_model: Path, other_model: Path) -> None:
    models = (f"--model=one={dummy_model}", f"--model=two={other_model}", "--load-format", "dummy")
    process = ServerProcess(*models, "--threads-bind", one_core())
    try:
        body = {"model": "two", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            process.process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.process.wait(30) == 0
    finally:
        process.stop()
    assert "leaked" not in process.log  # by nanobind, which tells of what is there at the end
