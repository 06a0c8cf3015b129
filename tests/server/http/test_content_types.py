"""No web page can use a server without keys, unless it is let: what a browser sends unasked is refused."""

from __future__ import annotations

import json

import pytest
from server.conftest import RunningServer, StartServer
from server.raw_http import connect, read_all

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "SAY(spent)YAS"}).encode()
PAGE = {"origin": "https://elsewhere.example"}


def send(server: RunningServer, path: str, headers: dict[str, str], body: bytes = b"", method: str = "POST") -> bytes:
    """The answer to exactly these headers."""
    given = {"host": "test", "connection": "close", **headers}
    if body:
        given["content-length"] = str(len(body))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in given.items())
    connection = connect(server)
    connection.sendall(head.encode() + b"\r\n" + body)
    return read_all(connection)


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "text/plain;charset=UTF-8",
        "text/plain; application/json",
        "application/x-www-form-urlencodedx",
        "multipart/form-data; boundary=application/json",
        "application/jsonx",
        "application/json-seq",
        "application/json, text/plain",
        "x" * 5000,
    ],
)
def test_what_is_not_sent_as_json_is_refused(server: RunningServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = send(server, COMPLETIONS, headers, BODY)
    assert status(response) == 415
    error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "unsupported_media_type"
    assert "-H 'content-type: application/json'" in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "application/json;charset=utf-8",
        "application/json ; charset=UTF-8",
        "application/vnd.api+json",
    ],
)
def test_json_is_served_under_all_its_names(server: RunningServer, content_type: str) -> None:
    response = send(server, COMPLETIONS, {"content-type": content_type}, BODY)
    assert status(response) == 200
    assert b'"spent"' in response


@pytest.mark.parametrize("path", [COMPLETIONS, "/api/generate", "/invocations"])
def test_programs_may_call_json_a_form(server: RunningServer, path: str) -> None:
    for kind in ("application/x-www-form-urlencoded", "Application/X-WWW-Form-Urlencoded; charset=utf-8"):
        response = send(server, path, {"content-type": kind}, BODY)
        assert status(response) == 200
        assert b"spent" in response.replace(b'","done":false}', b"") or path == "/api/generate"
        for header in ({"origin": "http://a.example"}, {"sec-fetch-site": "same-origin"}, {"origin": "null"}):
            assert status(send(server, path, {"content-type": kind, **header}, BODY)) == 415
    assert status(send(server, path, {"content-type": kind}, b"prompt=a")) == 400


def test_forms_for_what_is_not_here_get_a_404_that_says_so(server: RunningServer) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for path in ("/v1/audio/transcriptions", "/audio/translations", "/v1/images/edits"):
        response = send(server, path, headers, b"--x--")
        assert status(response) == 404
        assert b"reads and writes no sound" in response or b"writes text only" in response
        assert status(send(server, path, {**headers, **PAGE}, b"--x--")) == 415


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/ping", "/v1/responses/resp_1/cancel", COMPLETIONS])
@pytest.mark.parametrize(
    "headers",
    [
        PAGE,
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {**PAGE, "content-length": "0"},
        {**PAGE, "content-length": "0", "content-type": "application/x-www-form-urlencoded"},
    ],
)
def test_pages_may_not_post_without_a_body_either(server: RunningServer, path: str, headers: dict[str, str]) -> None:
    assert status(send(server, path, headers)) == 415


def test_programs_may_post_without_a_body(server: RunningServer) -> None:
    for headers in ({}, {"content-length": "0"}, {**PAGE, "content-type": "application/json"}):
        assert status(send(server, "/reset_prefix_cache", headers)) == 200
        assert status(send(server, "/ping", headers)) == 200


def test_chunked_bodies_are_bodies(server: RunningServer) -> None:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    connection = connect(server)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n" + body)
    assert connection.recv(4096).startswith(b"HTTP/1.1 415")
    connection.close()


def test_pages_that_are_let_ask_first(start_server: StartServer) -> None:
    server = start_server(allowed_origins=("https://friend.example",))
    for origin, allowed in (("https://friend.example", True), ("https://elsewhere.example", False)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "content-type"
        assert (status(send(server, COMPLETIONS, asked, method="OPTIONS")) == 200) == allowed
    answer = send(server, COMPLETIONS, {"origin": "https://friend.example", "content-type": "application/json"}, BODY)
    assert status(answer) == 200
    assert b"access-control-allow-origin: https://friend.example" in answer
    refused = send(server, COMPLETIONS, {"origin": "https://friend.example", "content-type": "text/plain"}, BODY)
    assert status(refused) == 415


def test_anthropics_clients_get_their_own_shape(server: RunningServer) -> None:
    response = send(server, "/v1/messages", {"content-type": "text/plain"}, BODY)
    assert status(response) == 415
    answer = json.loads(response.partition(b"\r\n\r\n")[2])
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
