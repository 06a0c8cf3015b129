"""Access: keys, origins, proxies and middleware; and what is logged about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server.conftest import RunningServer, StartProcess, StartServer
from server.raw_http import post_raw
from server.waiting import eventually, is_idle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.app_resources import read_key_file
from tidewheel.server.http.middleware import import_middleware

COMPLETIONS = "/v1/completions"
PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "a-key"}, 200),
        ({"x-api-key": "another", "authorization": "Basic nonsense"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer a-key"}, 200),
        ({"authorization": "bearer a-key"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer a-ke"}, 401),
        ({"authorization": "Bearer a-keys"}, 401),
    ],
)
def test_a_key_may_come_in_either_header(start_server: StartServer, headers: dict[str, str], status: int) -> None:
    guarded = start_server(api_keys=("a-key", "another"))
    assert guarded.http.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(("protect_health", "protect_metrics"), [(True, False), (False, True), (True, True)])
def test_probes_may_be_closed(start_server: StartServer, protect_health: bool, protect_metrics: bool) -> None:
    guarded = start_server(api_keys=("k",), protect_health=protect_health, protect_metrics=protect_metrics)
    for path, protected in (
        ("/health", protect_health),
        ("/ping", protect_health),
        ("/version", protect_health),
        ("/metrics", protect_metrics),
        ("/load", protect_metrics),
        ("/server_info", True),
    ):
        assert guarded.http.get(path).status_code == (401 if protected else 200)
        assert guarded.http.get(path, headers={"x-api-key": "k"}).status_code == 200


def test_a_file_of_keys_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TidewheelError, match="No such file"):
        read_key_file(str(tmp_path / "missing"))


def test_keys_of_all_sources_together_and_vllms_options_of_headers(start_process: StartProcess, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n")
    options = ("--allowed-origins", '["*"]', "--allow-credentials", "--enable-request-id-headers")
    server = start_process("--api-key-file", str(file), *options, environment={"VLLM_API_KEY": "from-environment"})
    for key, status in (("from-file", 200), ("from-environment", 200), ("other", 401)):
        assert server.client.get("/v1/models", headers={"x-api-key": key}).status_code == status
    assert "from-file" not in server.log
    assert "from-environment" not in server.log
    answer = server.client.get("/health", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_pages_of_other_origins_are_let_in_by_name_only(start_server: StartServer, server: RunningServer) -> None:
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers={"origin": PAGE}).headers
    opened = start_server(allowed_origins=(PAGE,), allow_credentials=True, api_keys=("k",))
    preflight = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    allowed = opened.http.options(COMPLETIONS, headers=preflight)  # without a key, as browsers send it
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["access-control-allow-credentials"] == "true"
    assert opened.http.options(COMPLETIONS, headers={**preflight, "origin": "https://evil.example"}).status_code == 400
    for headers, status in (({"x-api-key": "k"}, 200), ({}, 401)):
        answer = opened.http.post(COMPLETIONS, json={"prompt": "a"}, headers={**headers, "origin": PAGE})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    streamed = opened.http.post(
        COMPLETIONS, json={"prompt": "SAY(hi)YAS", "stream": True}, headers={"origin": PAGE, "x-api-key": "k"}
    )
    assert streamed.headers["access-control-allow-origin"] == PAGE
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_any_origin(start_server: StartServer) -> None:
    opened = start_server(allowed_origins=("*",), allowed_methods=("POST",), allowed_headers=("x-mine",))
    assert opened.http.get("/health", headers={"origin": PAGE}).headers["access-control-allow-origin"] == "*"
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    for header, status in (("x-mine", 200), ("x-other", 400)):
        headers = {**asked, "access-control-request-headers": header}
        assert opened.http.options(COMPLETIONS, headers=headers).status_code == status
    assert (
        opened.http.options(COMPLETIONS, headers={**asked, "access-control-request-method": "PUT"}).status_code == 400
    )


def test_behind_a_proxy_that_leaves_its_prefix_or_takes_it(start_server: StartServer) -> None:
    proxied = start_server(root_path="/llm", api_keys=("k",))
    for prefix in ("", "/llm"):
        assert proxied.http.get(f"{prefix}/health").status_code == 200
        assert proxied.http.get(f"{prefix}/").status_code == 200  # the page for people
        assert proxied.http.get(f"{prefix}/v1/models").status_code == 401
        assert proxied.http.get(f"{prefix}/v1/models", headers={"x-api-key": "k"}).status_code == 200
    for path in ("/llmhealth", "/llm/llm/health", "/health/", "/llm"):
        assert proxied.http.get(path).status_code == 401


class Marking:
    """An ASGI middleware that adds a header, and writes text larger."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"class")]
            elif message["type"] == "http.response.body":
                message["body"] = message["body"].replace(b'"text":"o', b'"text":"O')
            await send(message)

        await self.app(scope, receive, marked)


async def refusing(request: Request, call_next: Any) -> Response:
    if request.url.path == "/refused":
        return Response("no", 418)
    if request.url.path == "/broken":
        raise RuntimeError("middleware is broken")
    response: Response = await call_next(request)
    return response


class NeedsMore:
    def __init__(self, app: ASGIApp, more: int) -> None: ...


def test_middleware_of_ones_own(start_server: StartServer) -> None:
    paths = (f"{__name__}.Marking", f"{__name__}:refusing")
    marked = start_server(middleware=paths)
    assert marked.http.get("/refused").status_code == 418
    broken = marked.http.get("/broken", headers={"x-request-id": "mine"})
    assert broken.status_code == 500
    assert broken.json()["error"]["code"] == "internal_error"
    assert broken.headers["x-request-id"] == "mine"
    streamed = marked.post(COMPLETIONS, {"prompt": f"SAY({'o' * 500})YAS", "max_tokens": 500, "stream": True})
    assert streamed.headers["x-marked"] == "class"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert streamed.text.count('"text":"O') > 1  # every frame goes through it
    assert '"text":"o' not in streamed.text
    connection = post_raw(marked, {"prompt": "LOOP(", "max_tokens": 8000, "stream": True})
    assert connection.recv(12) == b"HTTP/1.1 200"
    connection.close()
    eventually(lambda: is_idle(marked), "the engine works on for a client that has gone")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module.Name", "no_such_module"),
        (f"{__name__}.Missing", "Missing"),
        ("json", "cannot be imported"),
        (f"{__name__}.PAGE", "neither a class nor an async function"),
        (f"{__name__}.NeedsMore", "more"),
    ],
)
def test_middleware_that_cannot_be_used(path: str, said: str) -> None:
    with pytest.raises(TidewheelError, match=said) as info:
        import_middleware(path)
    assert f"--middleware {path}" in str(info.value)


def test_ids_may_be_kept_from_answers(start_server: StartServer) -> None:
    silent = start_server(request_id_headers=False)
    assert "x-request-id" not in silent.http.get("/health").headers
    assert "x-request-id" not in silent.post(COMPLETIONS, {"prompt": "SAY(a)YAS", "stream": True}).headers


def test_the_access_log_names_requests_and_not_their_queries(
    start_server: StartServer, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = start_server(log_access=False)
    with caplog.at_level("INFO", logger="tidewheel.access"):
        for one in (server, quiet):
            one.http.get("/version?key=secret", headers={"x-request-id": f"port-{one.port}"})
            one.http.get("/no%0Athing")
    lines = [record.getMessage() for record in caplog.records if record.name == "tidewheel.access"]
    assert len(lines) == 2
    assert f'"GET /version" 200 x-request-id=port-{server.port}' in lines[0]
    assert '"GET /no%0Athing" 404' in lines[1]
    assert "secret" not in caplog.text


def test_the_access_log_has_the_reason_of_a_refusal(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tidewheel.access"):
        server.post(COMPLETIONS, {"prompt": "a", "temperature": -1})
        server.post(COMPLETIONS, {"prompt": "a", "model": "no\nsuch " + "x" * 5000})
        server.post("/v1/messages", {"messages": []})
    records = [record for record in caplog.records if record.name == "tidewheel.access"]
    assert ": temperature must be" in records[0].getMessage()
    assert "is not served here" in records[1].getMessage()
    assert all("\n" not in record.getMessage() and len(record.getMessage()) < 600 for record in records)
    assert "max_tokens is required" in records[2].fields["reason"]  # type: ignore[attr-defined]


def test_responses_of_named_paths_are_logged_only_if_they_are_errors(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(disable_access_log_for_endpoints=("/version", "/v1/models/none"))
    with caplog.at_level("INFO", logger="tidewheel.access"):
        for path in ("/version", "/v1/models/none", "/health"):
            server.http.get(path)
    lines = [record.getMessage() for record in caplog.records if record.name == "tidewheel.access"]
    assert len(lines) == 2
    assert '"GET /v1/models/none" 404' in lines[0]
    assert '"GET /health" 200' in lines[1]


def test_json_logs(start_process: StartProcess) -> None:
    server = start_process("--log-format", "json", "--api-key", "hidden-key")
    headers = {"authorization": "Bearer hidden-key", "x-request-id": "mine"}
    server.client.post(COMPLETIONS, json={"prompt": "SAY(a secret)YAS"}, headers=headers)
    server.process.terminate()
    assert server.wait() == 0
    entries = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)
    access = next(e for e in entries if e["logger"] == "tidewheel.access" and e["path"] == COMPLETIONS)
    assert (access["method"], access["status"], access["request_id"]) == ("POST", 200, "mine")
    done = next(e for e in entries if e["logger"] == "tidewheel.requests")
    assert (done["request_id"], done["finish"], done["completion_tokens"]) == ("mine", "stop", len("a secret."))
    assert "secret" not in server.log
    assert "hidden-key" not in server.log
