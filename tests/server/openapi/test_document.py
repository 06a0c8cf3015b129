"""`/openapi.json`: valid, complete, true to what the server takes; `/docs` shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import encoder_zoo as zoo
import jsonschema
import pytest
from openapi_spec_validator import validate
from server.conftest import RunningServer, StartServer
from server.scripted_engine import ScriptedEngine
from starlette.routing import Route

from tidewheel.engine.encoders.load import load_encoders
from tidewheel.server.api.docs import DOCS_PATHS
from tidewheel.server.api.web import web_routes
from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.openapi.document import declared

NOT_SERVED = {"/embed_sparse"}  # by these models
PAGES = DOCS_PATHS | {route.path for route in web_routes()}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(
        engine={"specials": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")},
        encoders=load_encoders([str(zoo.folder("bert")), str(zoo.folder("bert-cross"))], ["embed", "rank"]),
    )


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Any:
    return server.http.get("/openapi.json").json()


def operations(api: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def body_of(api: Any, path: str) -> Any:
    reference = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return api["components"]["schemas"][reference.rpartition("/")[2]]


def test_every_route_is_described() -> None:
    routes = build_app(ScriptedEngine(), AppOptions()).routes
    missing = [r.path for r in routes if isinstance(r, Route) and r.path not in PAGES and declared(r) is None]
    assert missing == [], "handlers of these paths need an @operation (server/openapi/document.py)"


def test_the_document_is_valid(api: Any) -> None:
    validate(api)
    ids = [operation["operationId"] for _, _, operation in operations(api)]
    assert len(set(ids)) == len(ids)


def test_references_are_all_used_and_there(api: Any) -> None:
    used = set(re.findall(r"'\$ref': '#/components/schemas/([\w.]+)'", str(api)))
    assert used == set(api["components"]["schemas"])


def test_examples_are_answered(server: RunningServer, api: Any) -> None:
    for path, method, operation in operations(api):
        if "requestBody" not in operation:
            continue
        example = operation["requestBody"]["content"]["application/json"]["example"]
        response = server.http.request(method, path, json=example)
        assert response.status_code == (404 if path in NOT_SERVED else 200), (path, response.text)


def test_refusals_are_described(server: RunningServer, api: Any) -> None:
    many_values = b'{"a": [' + b"0," * 2**21 + b"0]}"
    for path, method, operation in operations(api):
        if "requestBody" not in operation:
            continue
        for status, content, content_type in (
            (400, b"[]", "application/json"),
            (413, many_values, "application/json"),
            (415, b"{}", "text/plain"),
        ):
            response = server.http.request(method, path, content=content, headers={"content-type": content_type})
            assert response.status_code == status, (path, response.text)
            schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), {**schema, "components": api["components"]})


def test_unsupported_parameters_are_left_out(api: Any) -> None:
    completion = body_of(api, "/v1/completions")["properties"]
    assert "logits_processors" not in completion
    assert "temperature" in completion
    assert api["components"]["schemas"]["ResponseMessage"]["properties"]["refusal"] == {"type": "null"}


def bounds() -> list[tuple[str, str, float, bool]]:
    """Every bound that the document gives of a number: path, field, value, whether it is allowed."""
    api = build_app_document()
    found = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        for name, field in body_of(api, path)["properties"].items():
            for part in [field, *field.get("anyOf", ())]:
                step = 1 if part.get("type") == "integer" else 0.25
                for key, sign in (("minimum", -1), ("maximum", 1)):
                    if key in part:
                        found += [(path, name, part[key], True), (path, name, part[key] + sign * step, False)]
                if "exclusiveMinimum" in part:
                    found.append((path, name, part["exclusiveMinimum"], False))
    return found


def build_app_document() -> Any:
    from tidewheel.server.openapi.document import document

    return document(build_app(ScriptedEngine(), AppOptions()).routes, root_path="", open_paths=None)


NEEDS = {"min_tokens": {"max_tokens": 9}, "top_logprobs": {"logprobs": True}}


@pytest.mark.parametrize(("path", "field", "value", "allowed"), bounds())
def test_ranges_are_those_that_are_enforced(
    server: RunningServer, path: str, field: str, value: float, allowed: bool
) -> None:
    base = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = server.post(path, {**base, "max_tokens": 4, **NEEDS.get(field, {}), field: value})
    assert response.status_code == (200 if allowed else 400), response.text


ITEM = {"role": "user", "content": "SAY({})YAS"}
PART = {"text": "a"}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "fields", "allowed"),
    [
        (RESPONSES, {"input": [ITEM]}, True),
        (RESPONSES, {"input": [ITEM | {"type": "message"}]}, True),
        (RESPONSES, {"input": [ITEM | {"type": None}]}, True),
        (RESPONSES, {"input": [ITEM | {"type": "massage"}]}, False),
        (RESPONSES, {"input": [ITEM | {"content": [PART]}]}, False),
        (RESPONSES, {"input": [ITEM | {"content": [PART | {"type": "input_text"}]}]}, True),
        (RESPONSES, {"input": [{"call_id": "c", "name": "f", "arguments": "{}"}]}, False),
        (RESPONSES, {"input": [ITEM, {"type": "function_call_output", "call_id": "c", "output": [PART]}]}, False),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [PART], "content": [PART]}, ITEM]}, True),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [PART | {"type": "input_text"}]}, ITEM]}, False),
        (RESPONSES, {"input": "a", "tools": [{"name": "f"}]}, False),
        (RESPONSES, {"input": "a", "text": {"format": {}}}, False),
        (MESSAGES, {"system": [PART]}, True),
        (MESSAGES, {"system": [PART | {"type": None}]}, False),
        (MESSAGES, {"messages": [{"role": "user", "content": [PART]}]}, False),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, True),
        (MESSAGES, {"tools": [{"type": "custom", "name": "f", "input_schema": {"type": "object"}}]}, True),
        (MESSAGES, {"tool_choice": {}}, False),
        (MESSAGES, {"thinking": {}}, False),
        (MESSAGES, {"output_config": {"format": {"schema": {"type": "object"}}}}, True),
    ],
)  # fmt: skip
def test_tags_are_required_where_they_are(
    parsing_server: RunningServer, api: Any, path: str, fields: dict[str, Any], allowed: bool
) -> None:
    body = fields if path == RESPONSES else {"messages": [ITEM], "max_tokens": 4, **fields}
    schema = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": api["components"]})
    assert validator.is_valid(body) == allowed
    response = parsing_server.post(path, body)
    assert response.status_code == (200 if allowed else 400), response.text


def test_an_item_that_stands_for_another_needs_no_type(server: RunningServer, api: Any) -> None:
    item = server.post(RESPONSES, {"input": "a"}).json()["output"][0]["id"]
    for reference in ({"id": item}, {"id": item, "type": None}, {"id": item, "type": "item_reference"}):
        assert server.post(RESPONSES, {"input": [reference, ITEM]}).status_code == 200
        members = body_of(api, RESPONSES)["properties"]["input"]
        assert jsonschema.Draft202012Validator({**members, "components": api["components"]}).is_valid([reference])


def test_keys_are_asked_for_where_they_are(start_server: StartServer, api: Any) -> None:
    assert "securitySchemes" not in api["components"]
    closed = start_server(api_keys=["secret"])
    document = closed.http.get("/openapi.json").json()
    validate(document)
    for path, method, operation in operations(document):
        is_refused = closed.http.request(method, path.replace("{", "").replace("}", "")).status_code == 401
        assert (operation.get("security") == [{"bearerAuth": []}]) == is_refused, path


def test_the_docs_can_be_switched_off(start_server: StartServer) -> None:
    bare = start_server(docs=False)
    for path in ("/openapi.json", "/docs", "/docs/docs.js"):
        assert bare.http.get(path).status_code == 404


def test_the_page_is_ours_alone(server: RunningServer) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in re.sub(r'http-equiv|"https?"', "", page.text)
