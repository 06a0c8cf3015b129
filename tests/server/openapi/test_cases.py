"""`/openapi.json` tried out by schemathesis: nothing breaks, answers are as promised, and what it rules out is refused.

Bodies that ask for long answers are made smaller before they are sent, by their numbers of tokens and choices.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import encoder_zoo as zoo
import jsonschema
import pytest
import requests
from cores import one_core
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import sample
from server.conftest import ServerProcess
from server.scripted_engine import ScriptedEngine

from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.openapi.document import document

# Of each kind. The short runs are the same in every `make test` that has CI set.
EXAMPLES = [FEW := 4, pytest.param(250, marks=pytest.mark.sweep)]
DOCUMENT = document(build_app(ScriptedEngine(), AppOptions()).routes, root_path="", open_paths=None)
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
# Other names of what is tried already, and what only models for code, or with sparse vectors, do.
ALIASES = {path for path in DOCUMENT["paths"] if f"/v1{path}" in DOCUMENT["paths"]} - {"/embed"}
ALIASES |= {"/v1/embed", "/v2/rerank", "/invocations"}
SKIPPED = ALIASES | {"/infill", "/embed_sparse"}
TRIED = [case for case in OPERATIONS if case[0] not in SKIPPED]
WITH_BODY = [(path, method) for path, method in TRIED if "requestBody" in DOCUMENT["paths"][path][method]]
MODELS = {
    "/v1/embeddings": "embed", "/api/embed": "embed", "/api/embeddings": "embed",
    "/v1/score": "rank", "/v1/rerank": "rank", "/v1/classify": "rank", "/predict": "rank",
    **dict.fromkeys(["/v1/pooling", "/v2/embed", "/embed", "/embed_all", "/similarity"], "embed"),
}  # fmt: skip
MOST = {
    "max_tokens": 4,
    "num_predict": 4,
    "n_predict": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
    "min_tokens": 4,
    "n": 3,
    "best_of": 3,
}
FEW_WHOLE = [-(2**31) - 1, 2**31, 2**63 - 1, 2**80]
WHOLE = [sign * (2**bits + more) for bits in (8, 15, 31, 32, 40, 63, 64, 80) for more in (-1, 0) for sign in (-1, 1)]
FEW_BROKEN = [1e-45, 1e39, -5e-324]
BROKEN = [0, 5e-324, 1e-45, 1e-38, 1e38, 1e39, 1.7e308, -5e-324, -1e39, 2**80]
HELLO = [{"role": "user", "content": "Who are you?"}]


def is_translated(case: tuple[str, str]) -> bool:
    """Whether its requests are read as another path's, which is tried as well."""
    path = case[0]
    return (
        path == "/"
        or path.startswith(("/api/", "/embed"))
        or path.endswith(("/render", "/count_tokens", "/input_tokens", "/embed", "/predict", "/similarity"))
    )


# `make test` tries what is translated by its extreme numbers alone.
SAMPLE = sample(TRIED, lambda case: not is_translated(case))
SAMPLE_WITH_BODY = sample(WITH_BODY, lambda case: not is_translated(case))


def quick(path: str, examples: int) -> settings:
    """Fewer examples for what is translated."""
    most = max(examples // 5, 4) if is_translated((path, "")) else examples
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """The real command with a real model: what follows a grammar has to be masked in earnest."""
    process = ServerProcess(
        "--embedding-model", str(zoo.folder("bert")), str(zoo.folder("bert-cross")),
        "--served-embedding-model-name", "embed", "rank", "--max-model-len", "512",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
        "--disable-log-requests", "--disable-access-log", "--threads-bind", one_core(),
    )  # fmt: skip
    yield process
    process.stop()


@pytest.fixture(scope="module")
def schema(server: ServerProcess) -> Any:
    import schemathesis  # here, for it takes long

    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def make_small(body: Any, path: str) -> None:
    """Keeps answers short."""
    if not isinstance(body, dict):
        return
    for name, most in MOST.items():
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    if path in ("/v1/chat/completions", "/v1/completions"):
        body.setdefault("max_tokens", 4)
    options = body.get("options") or {}
    if path in ("/api/chat", "/api/generate") and isinstance(options, dict):
        body["options"] = {"num_predict": 4, **options}
        make_small(body["options"], "")


def make_served(body: Any, path: str) -> None:
    """Asks for a model that there is, about a conversation that its template takes."""
    if isinstance(body, dict):
        body["model"] = MODELS.get(path, "tidewheel-demo")
        if "messages" in body:
            body["messages"] = HELLO
        if path.startswith("/v1/responses"):
            body["input"] = HELLO
            body.pop("previous_response_id", None)


def check_events(response: requests.Response, path: str, method: str, kind: str) -> None:
    """Each event of a stream follows the document, or is an error. The last one says that the stream is over."""
    schemas = DOCUMENT["paths"][path][method]["responses"]
    kinds = [
        schemas["200"]["content"][kind]["schema"],
        schemas["default"]["content"]["application/json"]["schema"],
    ]
    validator = jsonschema.Draft202012Validator({"anyOf": kinds, "components": DOCUMENT["components"]})
    frames = response.text.split("\n\n" if kind == "text/event-stream" else "\n")
    assert frames.pop() == ""
    for frame in frames:
        data = frame.rpartition("data: ")[2]
        if data != "[DONE]":
            validator.validate(json.loads(data))


@functools.cache
def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    return [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        negative_data_rejection,
    ]


def send(case: Any, path: str, method: str, session: requests.Session) -> int:
    response = case.call(session=session)
    kind = response.headers.get("content-type", [""])[0].partition(";")[0]
    if kind in ("text/event-stream", "application/x-ndjson"):
        check_events(response, path, method, kind)
    else:
        case.validate_response(response, checks=checks())
    return int(response.status_code)


@pytest.fixture(scope="module")
def session() -> requests.Session:
    made = requests.Session()
    made.trust_env = False
    return made


# A process starts with the first test, and its document is read as a schema.
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("path", "method"), SAMPLE)
def test_what_the_document_allows(
    server: ServerProcess, schema: Any, session: requests.Session, path: str, method: str, examples: int
) -> None:
    from schemathesis import GenerationMode

    @quick(path, examples)
    @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE), wild=st.integers(0, 3))
    def check(case: Any, wild: int) -> None:
        make_small(case.body, path)
        if wild:
            make_served(case.body, path)
        answered.append(send(case, path, method, session) == 200)

    answered: list[bool] = []
    check()
    if "requestBody" in DOCUMENT["paths"][path][method] and examples > FEW:
        assert any(answered), "nothing is answered, so that little is tested"


def numbers(path: str) -> Iterator[tuple[str, bool]]:
    """A body's numbers by their names, and whether they are whole."""
    reference = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    for name, field in DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"].items():
        for part in [field, *field.get("anyOf", ())]:
            if part.get("type") in ("integer", "number"):
                yield name, part["type"] == "integer"
            if part.get("items", {}).get("type") == "integer":
                yield f"{name}[]", True


@pytest.mark.parametrize(
    ("whole", "broken"), [(FEW_WHOLE, FEW_BROKEN), pytest.param(WHOLE, BROKEN, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("path", [path for path, _ in WITH_BODY])
def test_extreme_numbers(
    server: ServerProcess, session: requests.Session, path: str, whole: list[float], broken: list[float]
) -> None:
    example = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    for name, is_whole in numbers(path):
        for value in whole if is_whole else broken:
            given = {**example, name.removesuffix("[]"): [value] if name.endswith("[]") else value}
            if name not in MOST:
                make_small(given, path)
            response = session.post(f"{server.url}{path}", json=given)
            assert response.status_code in (200, 400), (given, response.text)
    assert session.post(f"{server.url}{path}", json=example).status_code == 200


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("path", "method"), SAMPLE_WITH_BODY)
def test_what_it_does_not_allow_is_refused(
    server: ServerProcess, schema: Any, session: requests.Session, path: str, method: str, examples: int
) -> None:
    from schemathesis import GenerationMode

    @quick(path, examples)
    @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Any) -> None:
        make_small(case.body, path)
        send(case, path, method, session)

    check()


def test_nothing_is_left_running(server: ServerProcess, session: requests.Session) -> None:
    metrics = session.get(f"{server.url}/metrics").text
    for name in ("num_requests_running", "num_requests_waiting"):
        assert re.search(rf"^\w+:{name}(?:{{.*}})? 0\.0$", metrics, re.MULTILINE), name
