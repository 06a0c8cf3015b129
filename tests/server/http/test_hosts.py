"""The Host header, on a server whose names are given."""

from __future__ import annotations

import json

import pytest
from server.conftest import RefusedStart, RunningServer, StartServer
from server.raw_http import connect, read_all

ALLOWED = ("llm.example.com", "*.lan", "127.0.0.1", "[::1]", "LOCALHOST")


@pytest.fixture(scope="module")
def named(start_server: StartServer) -> RunningServer:
    return start_server(allowed_hosts=ALLOWED)


def ask(server: RunningServer, *hosts: str, path: str = "/v1/models", version: str = "1.1") -> tuple[int, bytes]:
    head = "".join(f"Host: {host}\r\n" for host in hosts)
    with connect(server) as connection:
        connection.sendall(f"GET {path} HTTP/{version}\r\n{head}connection: close\r\n\r\n".encode())
        status, _, rest = read_all(connection).partition(b"\r\n")
    return int(status.split()[1]), rest.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "host",
    [
        *("llm.example.com", "LLM.Example.com:8000", "llm.example.com.", "a.lan", "a.b.lan:80", "127.0.0.1:8000"),
        *("[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000", "localhost:1", "localhost:"),
    ],
)
def test_its_names_with_any_port(named: RunningServer, host: str) -> None:
    assert ask(named, host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "llm.example.com.evil.example", "evil-llm.example.com", "lan", ".lan.evil", "127.0.0.2"),
        *("[::2]", "::1", "[::1", "[::1]x", "llm.example.com@evil.example", "evil.example:8000@llm.example.com", ""),
        *("llm.example.com/", "*.lan", "localhost:8000:1", "localhost:x", "x" * 5000),
    ],
)
def test_other_names_are_refused(named: RunningServer, host: str) -> None:
    status, body = ask(named, host)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (421, "host_not_allowed", "host")
    assert "--allowed-hosts" in error["message"]
    assert len(body) < 500


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
def test_a_request_has_one_name(named: RunningServer, hosts: tuple[str, ...]) -> None:
    status, body = ask(named, *hosts)
    assert status == 400
    assert ask(named, *hosts, version="1.0")[0] == 400
    assert b"Host" in body or b"HTTP" in body


def test_the_refusal_has_the_shape_of_the_protocol(named: RunningServer) -> None:
    assert json.loads(ask(named, "evil", path="/v1/messages")[1])["type"] == "error"
    assert "--allowed-hosts" in json.loads(ask(named, "evil", path="/api/tags")[1])["error"]


def test_probes_ask_by_any_address(named: RunningServer) -> None:
    for path in ("/health", "/ping", "/version", "/load", "/metrics"):
        assert ask(named, "10.1.2.3:8000", path=path)[0] == 200
        assert ask(named, path=path, version="1.0")[0] == 200
    assert ask(named, "10.1.2.3:8000", path="/")[0] == 421


def test_without_names_all_are_served(server: RunningServer, start_server: StartServer) -> None:
    for one in (server, start_server(allowed_hosts=("*",))):
        assert ask(one, "evil.example")[0] == 200


@pytest.mark.parametrize("host", ["http://a", "a:80", "a/b", "*a", "a.*.b", "", "a b", "[::1]:80"])
def test_what_is_no_name(refused_start: RefusedStart, host: str) -> None:
    code, said = refused_start("--allowed-hosts", host)
    assert code == 2
    assert "must be a name or an address without scheme and port" in said
