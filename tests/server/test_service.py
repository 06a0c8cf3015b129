"""Everything around the answers: health, version, models, metrics, tokens, keys, limits and request ids."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer
from server.waiting import eventually

from tidewheel import __version__
from tidewheel.engine.errors import ModelError
from tidewheel.engine.model_names import short_name
from tidewheel.server.errors import ApiError
from tidewheel.server.served_models import ServedModels

COMPLETIONS = "/v1/completions"


def test_health_and_version(server: RunningServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.head("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}


def test_where_a_model_lies_is_not_shown(dummy_server: ServerProcess, demo_server: ServerProcess) -> None:
    for server, name in ((dummy_server, "tiny"), (demo_server, "tidewheel-demo")):
        headers = {"authorization": "Bearer secret"}
        listed, info = (
            httpx.get(f"{server.url}/{path}", headers=headers, trust_env=False).json()
            for path in ("v1/models", "server_info")
        )
        assert [(card["id"], card["root"]) for card in listed["data"]] == [(name, name)]
        assert info["model"] == name


def test_a_path_names_a_model_in_short_and_is_found_too(tmp_path: Path) -> None:
    path = tmp_path / "Small-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    assert short_name(str(path)) == "Small-Instruct.Q4_1"
    models = ServedModels([short_name(str(path))], str(path), lambda factor: 512, paths=[str(path)])
    for name in (str(path), "Small-Instruct.Q4_1", None):
        assert asyncio.run(models.resolve(name)) == "Small-Instruct.Q4_1"
    assert models.card(str(path)).id == "Small-Instruct.Q4_1"
    assert [card.id for card in models.cards] == ["Small-Instruct.Q4_1"]
    with pytest.raises(ModelError, match="names a model already"):
        models.check_new(str(path))


def test_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "models--own--model" / "snapshots" / "0123abcd"
    for folder in (tmp_path / "a.b", cached):
        folder.mkdir(parents=True)
    (tmp_path / "m-00001-of-00002.GGUF").touch()
    monkeypatch.chdir(tmp_path / "a.b")
    for given, name in (
        (f"{tmp_path}/a.b/", "a.b"),
        (".", "a.b"),
        ("../a.b", "a.b"),
        ("..", tmp_path.name),
        (f"{tmp_path}/a.b:Q4_K_M", "a.b:Q4_K_M"),
        (f"{tmp_path}/m-00001-of-00002.GGUF", "m"),
        (str(cached), "own/model"),
        ("own/model", "own/model"),
        ("own/model:Q4_K_M", "own/model:Q4_K_M"),
        ("/", "/"),
        ("a" * 5000, "a" * 5000),
    ):
        assert short_name(given) == name


def test_a_hub_id_is_shown() -> None:
    assert ServedModels(["short"], "organization/model", lambda factor: 512).root == "organization/model"


def test_any_name_is_answered_if_names_are_not_checked() -> None:
    models = ServedModels(["short"], "organization/model", lambda factor: 512, accepts_any=True)
    assert asyncio.run(models.resolve("another")) == "short"
    with pytest.raises(ApiError, match="not served here"):
        asyncio.run(ServedModels(["short"], "organization/model", lambda factor: 512).resolve("another"))


def test_ping(server: RunningServer) -> None:
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200


def test_load(start_server: StartServer) -> None:
    slow = start_server(engine={"step_s": 0.01})
    idle = {"server_load": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0}
    assert slow.http.get("/load").json() == idle
    with slow.http.stream(
        "POST", COMPLETIONS, json={"prompt": "LOOP(", "n": 3, "max_tokens": 8000, "stream": True}
    ) as r:
        next(r.iter_lines())
        busy = slow.http.get("/load").json()
        assert busy["server_load"] == busy["running"] + busy["waiting"] == 3
        assert 0 < busy["kv_cache_usage"] < 1
    eventually(lambda: bool(slow.http.get("/load").json() == idle), "the client has gone")


def test_server_info(dummy_server: ServerProcess, demo_server: ServerProcess) -> None:
    answer = httpx.get(f"{dummy_server.url}/server_info", headers={"authorization": "Bearer secret"}, trust_env=False)
    info = answer.json()
    assert info["version"] == __version__
    assert info["options"]["load_format"] == "dummy"
    assert info["options"]["max_num_seqs"] == 16
    assert info["engine"]["device"] == "cpu"
    assert info["engine"]["isa"]
    assert info["engine"]["dtype"] == "float32"
    assert info["max_model_len"] == 2048
    assert info["kv_cache_blocks"] * info["kv_cache_block_size"] >= 2048
    assert "api_key" not in info["options"]
    assert "secret" not in answer.text
    assert httpx.get(f"{dummy_server.url}/server_info", trust_env=False).status_code == 401
    assert httpx.get(f"{demo_server.url}/server_info", trust_env=False).json()["options"]["model"] is None


def test_the_prefix_cache_may_be_reset(server: RunningServer) -> None:
    body = {"prompt": "a prompt of a few blocks, which is found again SAY(a)YAS"}

    def cached() -> int:
        tokens: int = server.post(COMPLETIONS, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached() == 0
    assert cached() > 16
    assert server.http.get("/reset_prefix_cache").status_code == 405
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
    assert cached() > 16


def test_a_dead_engine_is_unhealthy_and_says_so(start_server: StartServer) -> None:
    dying = start_server()
    assert dying.post(COMPLETIONS, {"prompt": "KILL("}).status_code >= 500
    for response in (dying.http.get("/health"), dying.post(COMPLETIONS, {"prompt": "SAY(a)YAS"})):
        assert response.status_code == 503
        assert "the device is gone" in response.json()["error"]["message"]


# Two steps take a second each.
def test_a_step_that_takes_too_long_is_shown_and_counted(
    start_server: StartServer, capfd: pytest.CaptureFixture[str]
) -> None:
    watched = start_server(engine={"step_timeout_s": 0.2})
    assert watched.post(COMPLETIONS, {"prompt": "STALL("}).status_code == 200
    assert watched.post(COMPLETIONS, {"prompt": "STALL( again"}).status_code == 200
    shown = capfd.readouterr().err
    assert shown.count("in step") == 1  # at most once a minute
    assert "scripted_engine.py" in shown
    assert 'steps_stalled_total{model_name="scripted"} 2.0' in watched.http.get("/metrics").text


def test_models(start_server: StartServer, server: RunningServer) -> None:
    named = start_server(served_model_names=("big", "org/small"))
    listed = named.http.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["big", "org/small"]
    assert listed["data"][0]["max_model_len"] == named.engine.max_model_len
    (permission,) = listed["data"][0]["permission"]
    assert (permission["object"], permission["allow_sampling"]) == ("model_permission", True)
    assert named.http.get("/v1/models/org/small").json()["id"] == "org/small"
    assert named.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert named.post(COMPLETIONS, {"prompt": "a", "model": "org/small"}).json()["model"] == "big"  # as in vLLM
    assert named.post(COMPLETIONS, {"prompt": "a"}).json()["model"] == "big"
    assert named.post(COMPLETIONS, {"prompt": "a", "model": "scripted"}).status_code == 404
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["scripted"]


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == [256, *"hé".encode()]
    assert (answer["count"], answer["max_model_len"]) == (4, 8192)
    assert answer["token_strs"][:2] == ["<bos>", "h"]
    assert server.post("/tokenize", {"prompt": "hé", "add_special_tokens": False}).json()["count"] == 3
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = server.post("/tokenize", messages).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "<user>hi<assistant>"}
    long = "word " * 4000
    assert server.post("/tokenize", {"prompt": long}).json()["count"] == len(long) + 1


@pytest.fixture(scope="module")
def guarded(start_server: StartServer) -> RunningServer:
    return start_server(api_keys=("first-key", "zweiter-schlüssel"))


@pytest.mark.parametrize("path", ["/v1/models", COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_key_is_needed(guarded: RunningServer, path: str) -> None:
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {b"authorization": b"Bearer \xff\xfe"},
    ):
        response = guarded.http.request("GET" if "models" in path else "POST", path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first-key", "zweiter-schlüssel"])
def test_each_key_opens(guarded: RunningServer, key: str) -> None:
    headers = {b"authorization": f"Bearer {key}".encode()}
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
def test_probes_need_no_key(guarded: RunningServer, path: str) -> None:
    assert guarded.http.get(path).status_code == 200


@pytest.fixture(scope="module")
def tight(start_server: StartServer) -> RunningServer:
    return start_server(max_body_bytes=1000)


def test_a_body_over_the_limit_is_refused(tight: RunningServer) -> None:
    response = tight.post(COMPLETIONS, {"prompt": "a" * 2000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert "1000" in response.json()["error"]["message"]
    chunks = (b"a" * 100 for _ in range(50))
    assert tight.http.post(COMPLETIONS, content=chunks).status_code == 413
    assert tight.post(COMPLETIONS, {"prompt": "SAY(small)YAS"}).json()["choices"][0]["text"] == "small"


def test_a_large_body_is_refused_before_it_is_sent(tight: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", tight.port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 9999999999\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_request_ids(server: RunningServer) -> None:
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    given = {server.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(given) == 3
    assert server.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"
    assert "x-request-id" in server.post(COMPLETIONS, {"prompt": "SAY(a)YAS", "stream": True}).headers
    assert "x-request-id" in server.http.get("/nothing").headers


def test_requests_are_logged_unless_told_not_to(
    start_server: StartServer, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = start_server(log_requests=False)
    with caplog.at_level("INFO", logger="tidewheel.requests"):
        for one in (quiet, server):
            one.post(COMPLETIONS, {"prompt": "SAY(a)YAS"}, headers={"x-request-id": f"port-{one.port}"})
    lines = [record.getMessage() for record in caplog.records if record.name == "tidewheel.requests"]
    (line,) = lines
    assert f"x-request-id=port-{server.port}" in line
    assert "completion=2" in line
    assert "finish=stop" in line


def test_prompts_are_not_logged_unless_that_is_asked_for(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        server.post(COMPLETIONS, {"prompt": "SAY(a secret)YAS"})
        server.post(COMPLETIONS, {"prompt": "BREAK( a secret"})
    assert "secret" not in caplog.text


def test_answers_before_the_body_is_complete_do_not_break_the_connection(tight: RunningServer) -> None:
    with httpx.Client(base_url=tight.url, timeout=20, trust_env=False) as client:
        for _ in range(3):
            assert client.post(COMPLETIONS, content=b"a" * 5_000_000).status_code == 413
