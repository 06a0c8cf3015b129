"""Malformed requests for every endpoint that a server's `/openapi.json` names."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from attack import NO_FAILURE, Attack, Kinds, Wire, new_word

_WEIGHT = 0.5  # of each method of each path: there are dozens
# Fields that limit the answer's length: without them some attacks would be long valid requests.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_DEPTH = 5
_NUMBERS = (0, -1, 2**31, 2**63, 2**70, -(2**70), 1e308, -0.0, 0.5)
_TEXTS = ("", "\0", "\ud800", "\U0010ffff", "a" * 10_000, "../../etc/passwd", "\r\nx: y", "%s%n{0}", "\u202e")
_IDS = ("%2e%2e", "%00", "a" * 4000, "%ff%fe", "-1", "resp_0", "%0d%0ax:y", "..%2f..%2fetc%2fpasswd")
_RAW = (
    b"", b"{", b"null", b"[]", b"1", b'"a"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b'{"a": NaN}', b'{"prompt": 1e999}',
    b"{}{}", b'{"model": "a", "model": "b"}', b'{"\\ud800": 1}', b"[" * 10_000, b'{"a":' * 10_000, b"\0" * 1000,
)  # fmt: skip


def endpoint_attacks(wire: Wire, document: Mapping[str, Any]) -> Kinds:
    """A kind of attack for each method of each path of the document."""
    return [
        (_WEIGHT, partial(_malformed, wire, method.upper(), path, _Body(document, operation), operation))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


class _Body:
    """The JSON bodies of an operation, by their description in the document."""

    def __init__(self, document: Mapping[str, Any], operation: Mapping[str, Any]) -> None:
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        self._schemas = document["components"]["schemas"]
        self._fields = self._resolved(content.get("schema", {})).get("properties", {})
        self._example = content.get("example", {})

    def malformed(self, rng: random.Random) -> bytes:
        """A body that is an example with some fields changed, or something else."""
        if rng.random() < 0.1 or not self._fields:
            return rng.choice(_RAW)
        body = {**self._example, **{name: 2 for name in _LENGTHS if name in self._fields}}
        if "options" in self._fields:  # Ollama's
            body["options"] = {"num_predict": 2}
        for name in rng.sample([*self._fields], min(len(self._fields), rng.randint(1, 4))):
            body[name] = self._value(self._fields[name], rng, _DEPTH)
        if rng.random() < 0.1:
            del body[rng.choice([*body])]
        return json.dumps(body).encode()

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        name = schema.get("$ref", "").rpartition("/")[2]
        return self._schemas[name] if name else schema

    def _value(self, schema: Mapping[str, Any], rng: random.Random, depth: int) -> Any:
        """A value at the edges of what a schema allows, or one that it does not allow."""
        schema = self._resolved(schema)
        if depth == 0 or rng.random() < 0.1:
            return rng.choice((None, True, rng.choice(_NUMBERS), rng.choice(_TEXTS), [], {}, _nested(rng)))
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self._value(rng.choice(choices), rng, depth)
        if "const" in schema or "enum" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "string":
            return rng.choice((*_TEXTS, new_word(rng), new_word(rng)))
        if kind in ("integer", "number"):
            edges = [schema[edge] for edge in ("minimum", "maximum", "exclusiveMinimum") if edge in schema]
            return rng.choice((*edges, *(edge + 1 for edge in edges), *(edge - 1 for edge in edges), *_NUMBERS[:5]))
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "array":
            return [self._value(schema.get("items", {}), rng, depth - 1)] * rng.choice(
                (0, 1, 2, 300 if depth == _DEPTH else 3)
            )
        fields = {name: field for name, field in schema.get("properties", {}).items() if rng.random() < 0.5}
        required = {name: schema["properties"][name] for name in schema.get("required", ())}
        return {name: self._value(field, rng, depth - 1) for name, field in (required | fields).items()}


def _nested(rng: random.Random) -> Any:
    value: Any = "a"
    for _ in range(rng.choice((3, 100))):
        value = [value] if rng.random() < 0.5 else {"content": value}
    return value


def _malformed(
    wire: Wire, method: str, path: str, body: _Body, operation: Mapping[str, Any], rng: random.Random
) -> Attack:
    name = f"{method} {path}"
    for part in [part for part in path.split("/") if part.startswith("{")]:
        path = path.replace(part, rng.choice((*_IDS, new_word(rng))))
    if rng.random() < 0.3 or method == "GET":
        named = [field["name"] for field in operation.get("parameters", ()) if field["in"] == "query"]
        values = ("", "-1", "9" * 5000, "%00", "%ff", "true", "a" * 100, new_word(rng))
        fields = [f"{rng.choice((*named, 'limit', 'after', 'a'))}={rng.choice(values)}" for _ in range(3)]
        path += "?" + "&".join(fields)
    if method == "GET":
        return Attack(name, wire.get(path), NO_FAILURE)
    return Attack(name, wire.request(path, body.malformed(rng), method=method), NO_FAILURE)
