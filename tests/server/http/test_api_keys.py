"""API keys: their file, and what plain keys, marked ones and none may do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lora_files
import pytest
from cores import one_core
from server.conftest import RefusedStart, RunningServer, StartServer

from tidewheel.engine.adapters.options import LoraModule, LoraOptions
from tidewheel.engine.devices import CpuOptions
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.options import EngineOptions
from tidewheel.server.app_resources import read_key_file
from tidewheel.server.http.api_keys import ApiKeys, plain_key

PLAIN, OPERATOR, FAST = ({"x-api-key": key} for key in ("plain", "operator", "fast"))


@pytest.fixture(scope="module")
def server(start_server: StartServer, dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A tiny Llama with an adapter, which keys with several rights may use."""
    folder = tmp_path_factory.mktemp("adapters")
    lora_files.write(folder / "poems", lora_files.tensors())
    lora = LoraOptions(
        enable_lora=True, allow_runtime_lora_updating=True, lora_modules=[LoraModule("poems", str(folder / "poems"))]
    )
    engine = load_engine(
        EngineOptions(
            str(dummy_model),
            load_format="dummy",
            kv_cache_space=0.05,
            lora=lora,
            device_options=(CpuOptions(threads_bind=one_core()),),
        )
    )
    keys = folder / "keys"
    keys.write_text("plain\nfast name=fast priority\n")
    return start_server(
        engine=engine, api_key_file=str(keys), admin_api_keys=("operator",), served_model_names=("tiny",)
    )


def keys_of(path: Path, text: str) -> Any:
    path.write_text(text)
    return read_key_file(str(path))


def test_a_key_may_have_a_name_and_marks(tmp_path: Path) -> None:
    first, second, third = keys_of(
        tmp_path / "keys", "\ufeff# ours\nfirst\n\n  second \t admin  name=ops\nschlüssel priority"
    )
    assert first == plain_key("first")
    assert (second.owner, second.administers, second.prioritizes) == ("ops", True, False)
    assert (third.owner, third.prioritizes) == (plain_key("schlüssel").owner, True)
    assert re.fullmatch("key:[0-9a-f]{32}", first.owner)
    assert first.owner != plain_key("firs").owner
    assert "first" not in repr(first)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("# none", "has no keys in it"),
        ("a-secret hidden", "line 1 may have only name=NAME"),
        ("a-secret Admin", "line 1 may have only"),
        ("a-secret name=", "line 1 may have only"),
        ("a-secret name=a/b", "line 1 may have only"),
        ("a-secret name=" + "x" * 65, "line 1 may have only"),
        ("# a comment\na-secret admin admin", "line 2 repeats a word"),
        ("a-secret name=a name=b", "line 1 repeats a word"),
        ("a-secret\x7f admin", "line 1 has no key: a key must have"),
    ],
)
def test_a_line_that_is_none_is_named_and_not_quoted(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(TidewheelError, match=said) as info:
        keys_of(tmp_path / "keys", line)
    assert "secret" not in str(info.value)
    assert "hidden" not in str(info.value)


def test_one_key_is_one_tenants(refused_start: RefusedStart, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a-secret name=a\n")
    code, said = refused_start("--api-key", "a-secret", "--api-key-file", str(file))
    assert code == 1
    assert "one API key is given twice, with different names or rights" in said
    assert "a-secret" not in said
    assert len(ApiKeys([plain_key("a"), plain_key("a")])) == 1


def error_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 403, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "key_not_allowed")
    assert "--api-key-file" in error["message"]
    return error


def test_only_a_key_that_may_administer_changes_the_server_for_all(server: RunningServer, tmp_path: Path) -> None:
    lora_files.write(tmp_path / "rhymes", lora_files.tensors(1))
    load = {"lora_name": "rhymes", "lora_path": str(tmp_path / "rhymes")}
    asked: list[tuple[str, Any]] = [
        ("/v1/load_lora_adapter", load),
        ("/unload_lora_adapter", {"lora_name": "rhymes"}),
        ("/v1/load_lora_adapter", None),  # without permission, one learns nothing of how to do it
        ("/reset_prefix_cache", None),
    ]
    for path, body in asked:
        for key in (PLAIN, FAST):
            assert "marks keys with 'admin'" in error_of(server.post(path, body, headers=key))["message"]
    for path, body in (asked[0], asked[1], asked[3]):
        assert server.post(path, body, headers=OPERATOR).status_code == 200, path
    infos = [server.http.get("/server_info", headers=key).json() for key in (PLAIN, OPERATOR)]
    assert (infos[0]["options"], infos[0]["version"]) == ({}, infos[1]["version"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/invocations", {"prompt": "a", "model": "poems"}),
    ],
)
def test_only_a_key_that_may_prioritize_goes_before_others(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {**body, limit: 1}
    assert error_of(server.post(path, {**body, "priority": -1}, headers=PLAIN))["param"] == "priority"
    for key, priority in ((PLAIN, 0), (PLAIN, 7), (PLAIN, None), (FAST, -1), (OPERATOR, -1)):
        assert server.post(path, {**body, "priority": priority}, headers=key).status_code == 200, (key, priority)


def test_metrics_have_names_of_adapters_for_those_with_a_key(server: RunningServer) -> None:
    def scraped(**headers: str) -> str:
        answer = server.http.get("/metrics", headers=headers)
        assert answer.status_code == 200
        return answer.text

    for key in ("", "wrong", "plain "[:-2]):
        text = scraped(**{"x-api-key": key})
        assert "tidewheel:num_requests_running" in text
        assert "lora" not in text
    for headers in (PLAIN, OPERATOR, {"authorization": "Bearer fast"}):
        assert "running_lora_adapters=" in scraped(**headers)


def test_the_document_says_where_rights_are_needed(server: RunningServer) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    with_403 = {path for path, one in paths.items() for told in one.values() if "403" in told["responses"]}
    assert {"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/chat/completions", "/v1/responses"} <= with_403
    assert not with_403 & {"/v1/models", "/health", "/v1/embeddings", "/server_info"}


def test_marks_tell_keys_of_one_owner_apart(start_server: StartServer, tmp_path: Path) -> None:
    """Marking one of an owner's keys does not mark the other."""
    file = tmp_path / "keys"
    file.write_text("one name=us priority\n")
    alone = start_server(api_key_file=str(file))
    assert alone.post("/reset_prefix_cache", None, headers={"x-api-key": "one"}).status_code == 200
    file.write_text("one name=us\nother name=us admin\n")
    ours = start_server(api_key_file=str(file))
    made = ours.post("/v1/responses", {"input": "a"}, headers={"x-api-key": "one"}).json()
    assert ours.http.get(f"/v1/responses/{made['id']}", headers={"x-api-key": "other"}).status_code == 200
    for key, status in (("one", 403), ("other", 200)):
        assert ours.post("/reset_prefix_cache", None, headers={"x-api-key": key}).status_code == status


@pytest.fixture
def connection(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, limits=httpx.Limits(max_connections=1)) as client:
        yield client


def test_a_connection_carries_no_right_to_its_next_request(connection: httpx.Client) -> None:
    for headers, status in ((OPERATOR, 200), (PLAIN, 403), ({}, 401), (OPERATOR, 200)):
        assert connection.post("/reset_prefix_cache", headers=headers).status_code == status
        assert ("lora" in connection.get("/metrics", headers=headers).text) == bool(headers)
