"""A Hugging Face hub that is a small server on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

Repositories = Mapping[str, Mapping[str, bytes]]

TOKEN = "hf_of_the_tests"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Claimed(bytes):
    """A file that the hub says has `claimed` bytes."""

    claimed = 1 << 50


class Late(bytes):
    """A file that comes after `delay_s` seconds."""

    delay_s = 2.1


class _Handler(BaseHTTPRequestHandler):
    """The hub's endpoints as its client uses them; own/gated is own/model, for those who have the TOKEN."""

    protocol_version = "HTTP/1.1"
    repositories: Repositories
    sent: dict[str, int]  # bytes of each file's content
    may_send: threading.Event

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        may_enter = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        files = self.repositories.get("own/model" if name == "own/gated" else name)
        if name == "own/gated" and not may_enter:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif parts[0] != "api":
            self._file(files, "/".join(parts[4:]), parts[3])
        elif parts[4:5] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n.encode().hex()} for n, b in files.items()]
            self._answer(200, json.dumps(tree).encode())
        else:
            revision = parts[5] if len(parts) > 5 else "main"
            commit = COMMITS.get(revision, revision)
            if commit not in COMMITS.values():
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                sizes = {file: getattr(content, "claimed", len(content)) for file, content in files.items()}
                siblings = [{"rfilename": n, "size": size, "blobId": n.encode().hex()} for n, size in sizes.items()]
                self._answer(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())

    def _file(self, files: Mapping[str, bytes], name: str, revision: str) -> None:
        commit = COMMITS.get(revision, revision)
        if name not in files:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        body, status = files[name], 200
        headers = {"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": commit}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(body), len(body))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(body)}"
            body, status = body[int(first) : end], 206
        if self.command != "HEAD":
            self.may_send.wait()
            if status == 200:
                time.sleep(getattr(files[name], "delay_s", 0))
            self.sent[name] = self.sent.get(name, 0) + len(body)
        self._answer(status, body, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # a client that did not wait
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakeHub:
    """A running hub. `sent` counts the bytes of each file that were sent, by the file's name.

    Files are held back while `may_send` is cleared.
    """

    def __init__(
        self, endpoint: str, repositories: Repositories, sent: dict[str, int], may_send: threading.Event
    ) -> None:
        self.endpoint, self.repositories, self.sent, self.may_send = endpoint, repositories, sent, may_send

    def environment(self, home: Path, *, offline: bool = False) -> dict[str, str]:
        """The environment of a process that uses this hub, and a cache in the folder `home`."""
        return hub_environment(self.endpoint, home, offline=offline)


def hub_environment(endpoint: str, home: Path, *, offline: bool = False) -> dict[str, str]:
    """This process's environment with that hub, and without what would name another or a token."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    return {name: value for name, value in environment.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}


@contextmanager
def with_hub(endpoint: str, home: Path, *, offline: bool = False) -> Iterator[None]:
    """Within, this process has that hub and a cache in `home`, though the client has read its environment already."""
    from huggingface_hub import constants

    values = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_TOKEN_PATH": os.environ.get("HF_TOKEN_PATH", str(home / "token")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setattr(constants, name, value)
        yield


@contextmanager
def fake_hub(repositories: Repositories) -> Iterator[FakeHub]:
    """A hub with these repositories' files."""
    sent: dict[str, int] = {}
    may_send = threading.Event()
    may_send.set()
    handler = type("Handler", (_Handler,), {"repositories": repositories, "sent": sent, "may_send": may_send})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # clients keep connections open
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield FakeHub(f"http://127.0.0.1:{server.server_port}", repositories, sent, may_send)
    finally:
        may_send.set()
        server.shutdown()
        thread.join()
        server.server_close()
