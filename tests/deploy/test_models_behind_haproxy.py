"""HAProxy, as the example configures it, before servers that load models on demand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from deploy.proxies import ROOT, Proxy
from server.waiting import eventually

SECTION = re.compile(r"^# (backend model-chat .*\n(?:#     .*\n)+)", re.MULTILINE)


class Replica:
    """A server that says which models it has loaded, and answers by its name."""

    def __init__(self, name: str) -> None:
        self.loaded: set[str] = set()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path, _, model = self.path.partition("?model=")
                self._answer({}, 200 if path == "/health" and (not model or model in replica.loaded) else 503)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._answer({"replica": name}, 200)

            def _answer(self, content: Any, status: int) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    servers = [Replica("one"), Replica("two")]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def proxy(replicas: list[Replica], tmp_path: Path) -> Iterator[Proxy]:
    """HAProxy with the file's section of a model, and another for a model with a folder, checked more often."""
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    (section,) = SECTION.findall(text)
    chat = "\n" + re.sub(r"^#     (?!#)", "    ", section, flags=re.MULTILINE)
    coder = chat.replace("model-chat", "model-org-coder").replace("model=chat", "model=org/coder")
    source = tmp_path / "source.cfg"
    # Else a check may take no longer than the time until the next one.
    text = text.replace("    timeout connect 2s\n", "    timeout connect 2s\n    timeout check 10s\n")
    source.write_text((text + chat + coder).replace("inter 2s fall 2", "inter 100ms fall 1"))
    proxy = Proxy("haproxy", [server.port for server in replicas], tmp_path, source)
    yield proxy
    proxy.stop()


def asked(proxy: Proxy, model: str, numbers: Iterable[int] = range(16)) -> set[str]:
    """Who answers these conversations with a model."""
    names = set()
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=30) as client:
        for number in numbers:
            body = {"messages": [{"role": "user", "content": f"the {number}th question"}], "model": model}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            names.add(str(answer.json()["replica"]))
    return names


def test_requests_go_where_their_model_is_loaded(proxy: Proxy, replicas: list[Replica]) -> None:
    one, two = replicas
    one.loaded, two.loaded = {"chat"}, {"org/coder"}
    eventually(lambda: asked(proxy, "chat") == {"one"}, "the other has not loaded it")
    eventually(lambda: asked(proxy, "org/coder") == {"two"}, "the other has not loaded it")
    one.loaded, two.loaded = set(), {"chat"}
    eventually(lambda: asked(proxy, "chat") == {"two"}, "it has moved")
    one.loaded = {"chat"}
    eventually(lambda: asked(proxy, "chat") == {"one", "two"}, "both have it")
    assert len(asked(proxy, "chat", [7] * 8)) == 1  # a conversation stays


def test_a_model_that_none_has_loaded_is_loaded_by_one(proxy: Proxy, replicas: list[Replica]) -> None:
    replicas[0].loaded = {"chat"}
    eventually(lambda: asked(proxy, "chat") == {"one"}, "the other has not loaded it")
    assert len(asked(proxy, "org/coder")) == 1
    assert asked(proxy, "another") == {"one", "two"}  # which has no section
