"""Harnesses of what is looked at before a body is decoded: its JSON's values, its type, and the request's path."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from fuzz.harness import Harness, written

from tidewheel.server.http.json_limits import JsonCounts
from tidewheel.server.http.middleware import BodyLimit, JsonOnly, RequestId
from tidewheel.server.http.path_normalization import PathNormalization

HEADS: list[dict[str, Any]] = [
    {"method": "POST", "path": "//v1//chat/completions/", "root": "",
     "headers": {"content-type": "application/json; charset=utf-8", "content-length": "20", "x-request-id": "a"}},
    {"method": "PUT", "path": "/api/v1//x", "root": "/api", "headers": {"content-type": "application/vnd.a+json"}},
    {"method": "GET", "path": "/v1/", "root": "/", "headers": {"origin": "null"}},
    {"method": "POST", "path": "/v1/x", "root": "", "headers": {"content-type": "text/plain", "origin": "http://a"}},
]  # fmt: skip
BODIES = [{"a": ["[{,:\\", {}, [], 'b"\\\\"'], "": {"b": [1, -2.5e3, None], "\\": "ü\u2028"}}, [[[]], {"a": {}}]]


class Pairs(list[Any]):
    """An object's members, including several of the same name."""


def found_in(text: str) -> tuple[int, int]:
    """The commas of JSON, and its brackets and colons."""
    waiting, values, parts = [json.loads(text, object_pairs_hook=Pairs)], 0, 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            values += max(len(value) - 1, 0)
            parts += 1
            if isinstance(value, Pairs):
                parts += len(value)
                value = [inner for _, inner in value]
            waiting += value
    return values, parts


def counted(*pieces: bytes) -> tuple[int, int]:
    counts = JsonCounts()
    for piece in pieces:
        counts.add(piece)
    return counts.values, counts.parts


def json_counts(data: bytes) -> None:
    whole = counted(data)
    assert counted(*(data[at : at + 1] for at in range(len(data)))) == whole
    for cut in range(0, len(data), 1 + len(data) // 20):
        assert counted(data[:cut], data[cut:]) == whole
    with contextlib.suppress(ValueError, RecursionError):
        assert found_in(data.decode()) == whole


def is_json(content_type: str) -> bool:
    name = content_type.partition(";")[0].strip(" \t").lower()
    kind, _, suffix = name.removeprefix("application/").rpartition("+")
    return name.startswith("application/") and suffix == "json" and (bool(kind) or "+" not in name)


def may_be_a_form(path: str, root: str, content_type: str) -> bool:
    local = path[len(root) :] if root and path.startswith(root + "/") else path
    kind = content_type.partition(";")[0].strip(" \t").lower()
    return kind == "application/x-www-form-urlencoded" or local.removeprefix("/v1").startswith(("/audio/", "/images/"))


def request_head(data: bytes) -> None:
    try:
        head = json.loads(data)
        path, root, method = (str(head[name]) for name in ("path", "root", "method"))
        headers = {str(name).lower(): str(value) for name, value in head["headers"].items()}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    if not headers.get("content-length", "0").isascii() or len(headers.get("content-length", "")) > 20:
        return  # the HTTP parser lets none through
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "client": None, "query_string": b""}
    sent: list[Any] = []
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    chain = RequestId(
        BodyLimit(JsonOnly(PathNormalization(app)), 1000), root_path=root, send_header=True, access_log=True
    )
    with contextlib.suppress(StopIteration):
        chain(scope, receive, send).__await__().send(None)
    status, length = sent[0]["status"], headers.get("content-length", "0")
    assert dict(sent[0]["headers"])[b"x-request-id"]
    if length.isdecimal() and int(length) > 1000:
        assert status == 413
    elif method not in ("GET", "HEAD", "OPTIONS", "DELETE") and not is_json(headers.get("content-type", "")):
        has_body = length != "0" or "transfer-encoding" in headers
        has_body = has_body and not may_be_a_form(path, root, headers.get("content-type", ""))
        assert status == (415 if has_body or "origin" in headers or "sec-fetch-site" in headers else 200)
    else:
        assert status == 200
    for tidy in reached:
        assert tidy == path or tidy.replace("/", "") == path.replace("/", "")
        is_under = path.startswith(root + "/") if root else False
        below = tidy[len(root) :] if is_under else tidy
        assert not below.startswith("/v1/") or ("//" not in below and not below.endswith("/"))


REQUEST_HARNESSES = {
    "json-counts": Harness(json_counts, written(*BODIES)),
    "request-head": Harness(request_head, written(*HEADS)),
}
