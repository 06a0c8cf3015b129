"""Hostile requests, which try to crash a server of language models, stall it, or exhaust its memory.

Each attack is the bytes of one connection, and the statuses that a server may answer with. The only 5xx statuses among
them are 503 and 504: a client's mistake must not become a failure of the server.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attack import CHAT, COMPLETIONS, REFUSED, SERVED_OR_REFUSED, TOO_LARGE, Attack, Kinds, Wire, new_word

_OVER_LIMIT = 33 * 2**20  # bytes, more than the default of --max-body-size with a model that sees
_ASK: Mapping[str, Any] = {"prompt": "a", "max_tokens": 2}


class Attacks:
    """All attacks: those on generation, and `more`. `size` is the size of the largest bodies, in bytes."""

    def __init__(self, wire: Wire, size: int = 16_000_000, more: Kinds = ()) -> None:
        self._wire, self._size = wire, size
        # Large bodies are rare, because sending them takes the client as long as the server.
        self.kinds: Kinds = (
            (8, self._deep_schema),
            (8, self._deep_grammar),
            (4, self._exponential_schema),
            (8, self._large_grammar),
            (1, self._slow_regex),
            (8, self._deep_tools),
            (8, self._too_many_logprobs),
            (8, self._wrong_content_type),
            (8, self._no_version),
            (8, self._half_closed),
            (4, self._pipelined),
            (8, self._bad_field),
            (4, self._deep_json),
            (4, self._own_template),
            (1, self._long_text),
            (1, self._long_key),
            (1, self._many_ids),
            (1, self._many_messages),
            (1, self._many_values),
            (2, self._many_calls),
            (1, self._too_large),
            (1, self._stopped_body),
            (8, self._strange_address),
            (2, self._many_parts),
            (2, self._many_answers),
            *more,
        )

    def pick(self, rng: random.Random) -> Attack:
        """One attack, drawn at random."""
        weights = [weight for weight, _ in self.kinds]
        make = rng.choices([make for _, make in self.kinds], weights)[0]
        return make(rng)

    def _deep_schema(self, rng: random.Random) -> Attack:
        length, salt = rng.randint(100, 3000), new_word(rng)
        following: Callable[[str], dict[str, Any]] = rng.choice((
            lambda ref: {"type": "object", "properties": {salt: {"$ref": ref}}, "required": [salt]},
            lambda ref: {"$ref": ref},
            lambda ref: {"type": "array", "items": {"$ref": ref}, "minItems": 1},
            lambda ref: {"allOf": [{"$ref": ref}]},
            lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]},
        ))  # fmt: skip
        schema = {**_chain(length, following), "title": salt}
        return self._wire.post("deep schema", COMPLETIONS, {**_ASK, "guided_json": schema}, SERVED_OR_REFUSED)

    def _deep_tools(self, rng: random.Random) -> Attack:
        salt = new_word(rng)
        schema = _chain(rng.randint(100, 2000), lambda ref: {"type": "object", "properties": {salt: {"$ref": ref}}})
        body = {
            "messages": [{"role": "user", "content": "go"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
            "max_tokens": 4,
        }
        return self._wire.post("deep tools", CHAT, body, SERVED_OR_REFUSED)

    def _deep_grammar(self, rng: random.Random) -> Attack:
        length, salt = rng.randint(1000, 8000), new_word(rng)
        if rng.random() < 0.5:
            rules = [f"r{i}: r{i + 1}" for i in range(length)]
            grammar = "\n".join(["start: r0", *rules, f'r{length}: "{salt}"'])
        else:
            rules = [f"r{i} ::= r{i + 1}" for i in range(length)]
            grammar = "\n".join(["root ::= r0", *rules, f'r{length} ::= "{salt}"'])
        return self._wire.post("deep grammar", COMPLETIONS, {**_ASK, "guided_grammar": grammar}, SERVED_OR_REFUSED)

    def _exponential_schema(self, rng: random.Random) -> Attack:
        definitions: dict[str, Any] = {
            f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(30)
        }
        definitions["d30"] = {"type": "string"}
        schema = {"properties": {new_word(rng): {"$ref": "#/$defs/d0"}}, "$defs": definitions}
        tag = {"type": "structural_tag", "format": {"type": "qwen_xml_parameter", "json_schema": schema}}
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2, "response_format": tag}
        return self._wire.post("exponential schema", CHAT, body, SERVED_OR_REFUSED)

    def _large_grammar(self, rng: random.Random) -> Attack:
        salt = new_word(rng)
        field, value = rng.choice((
            ("guided_choice", [f"{salt}{i}" for i in range(rng.choice((2001, 20_000)))]),
            ("guided_json", {"type": "object", "properties": {f"{salt}{i}": {} for i in range(600)}}),
            ("guided_regex", f"{salt}a{{1000000}}"),
            ("guided_regex", "(" * 5000 + salt + ")" * 5000),
            ("guided_regex", f"{salt}(x+x+)+y" * 50),
        ))  # fmt: skip
        return self._wire.post("large grammar", COMPLETIONS, {**_ASK, field: value}, SERVED_OR_REFUSED)

    def _slow_regex(self, rng: random.Random) -> Attack:
        regex = f"{new_word(rng)}|(a|b)*a(a|b){{{rng.randint(8, 24)}}}"
        body = {**_ASK, "max_tokens": 24, "guided_regex": regex}
        return self._wire.post("slow regex", COMPLETIONS, body, SERVED_OR_REFUSED)

    def _too_many_logprobs(self, rng: random.Random) -> Attack:
        prompts = [f"{new_word(rng)} " * 200] * 150
        body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20, "logprobs": 20, "n": 8}
        return self._wire.post("too many logprobs", COMPLETIONS, body, REFUSED)

    def _wrong_content_type(self, rng: random.Random) -> Attack:
        kind = rng.choice(("text/plain", "application/octet-stream", "multipart/form-data; boundary=x"))
        path = rng.choice((COMPLETIONS, CHAT, "/v1/messages", "/v1/responses", "/tokenize"))
        return self._wire.post("wrong content type", path, _ASK, frozenset({415}), content_type=kind)

    def _no_version(self, rng: random.Random) -> Attack:
        line = rng.choice(("GET /health", "GET /health HTTP/7.3", "POST /v1/completions", "GET"))
        return Attack("no version", f"{line}\r\n\r\n".encode(), REFUSED)

    def _half_closed(self, rng: random.Random) -> Attack:
        attack = self._wire.post("half closed", COMPLETIONS, {**_ASK, "prompt": new_word(rng)}, frozenset({200}))
        return attack._replace(half_closes=True)

    def _pipelined(self, rng: random.Random) -> Attack:
        one = f"GET /v1/models HTTP/1.1\r\n{self._wire.head.replace('close', 'keep-alive')}\r\n".encode()
        return Attack("pipelined", one * rng.randint(1000, 10_000), frozenset({200}), reads=False)

    def _bad_field(self, rng: random.Random) -> Attack:
        fields: Sequence[dict[str, Any]] = (
            {"logit_bias": {"abc": 1}}, {"n": 10**9}, {"max_tokens": -1}, {"temperature": "hot"}, {"seed": 2**70},
            {"stop": ["x"] * 1000}, {"bad_words": ["a" * 10_000]}, {"top_k": 1.5}, {"prompt": [[-1]]},
            {"stream_options": {new_word(rng) * 100: 1}}, {"n_predict": 1}, {"allowed_token_ids": []},
            {"model": new_word(rng) * 1000},
        )  # fmt: skip
        return self._wire.post("bad field", COMPLETIONS, {**_ASK, **rng.choice(fields)}, frozenset({400, 404}))

    def _deep_json(self, rng: random.Random) -> Attack:
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        depth = rng.randint(1000, 100_000)
        content = b'{"prompt": "a", "metadata": ' + opening * depth + b"1" + closing * depth + b"}"
        return Attack("deep json", self._wire.request(COMPLETIONS, content), SERVED_OR_REFUSED)

    def _own_template(self, rng: random.Random) -> Attack:
        template = rng.choice((
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{{ 'a' * 10000000000 }}",
            "{{ strftime_now('%Y' * 1000000) }}",
            "{% set a = 'a' * 99999 %}" + "{% set a = a ~ a %}" * 40 + "{{ a }}",
            "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
            "{{ 9 ** (9 ** 9) }}",
            "{{ '%9999999999d' % 1 }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        ))  # fmt: skip
        body = {"messages": [{"role": "user", "content": "go"}], "chat_template": template, "max_tokens": 1}
        return self._wire.post("own template", CHAT, body, frozenset({400, 429, 503, 504}))

    def _long_text(self, rng: random.Random) -> Attack:
        cut = b'{"max_tokens": 1, "truncate_prompt_tokens": 5, "prompt": "'
        text = rng.choice(("a", " ", "7", "<|im_start|>", "\u00e9", "\U0001f30a"))
        filled = text.encode() * (self._size // len(text.encode()) - 20)
        path, before, after, allowed = rng.choice((
            (CHAT, b'{"messages": [{"role": "user", "content": "', b'"}]}', TOO_LARGE),
            (COMPLETIONS, b'{"prompt": "', b'"}', TOO_LARGE),
            (COMPLETIONS, cut, b'"}', frozenset({200, 400, 413})),
            ("/tokenize", b'{"prompt": "', b'"}', TOO_LARGE),
        ))  # fmt: skip
        return Attack("long text", self._wire.request(path, before + filled + after), allowed)

    def _long_key(self, rng: random.Random) -> Attack:
        content = b'{"prompt": "a", "' + b"k" * self._size + b'": 1}'
        return Attack("long key", self._wire.request(COMPLETIONS, content), TOO_LARGE)

    def _many_ids(self, rng: random.Random) -> Attack:
        content = b'{"tokens": [' + b"1," * (self._size // 2 - 20) + b"1]}"
        return Attack("many ids", self._wire.request("/detokenize", content), TOO_LARGE)

    def _many_messages(self, rng: random.Random) -> Attack:
        one = b'{"role":"user","content":"a"},'
        content = b'{"messages": [' + one * (self._size // len(one) - 2) + one[:-1] + b"]}"
        return Attack("many messages", self._wire.request(CHAT, content), TOO_LARGE)

    def _many_values(self, rng: random.Random) -> Attack:
        one = rng.choice((b"[],", b"{},", b'"",', b"[[]],", b"0.5,"))
        content = b'{"prompt": "a", "max_tokens": 1, "metadata": {"a": [' + one * (self._size // len(one) - 30)
        return Attack("many values", self._wire.request(COMPLETIONS, content + one[:-1] + b"]}}"), SERVED_OR_REFUSED)

    def _many_calls(self, rng: random.Random) -> Attack:
        count = 4096  # calls, and as many results: together with their turns, the maximum of a conversation's pieces
        path, body = rng.choice((("/api/chat", _ollama_calls), ("/v1/responses", _response_calls),
            ("/v1/messages", _message_calls)))  # fmt: skip
        return self._wire.post("many calls", path, body(count, new_word(rng)), SERVED_OR_REFUSED)

    def _too_large(self, rng: random.Random) -> Attack:
        path = rng.choice((CHAT, COMPLETIONS, "/v1/messages", "/api/chat"))
        return Attack("too large", self._wire.request(path, b"a" * _OVER_LIMIT), frozenset({413}))

    def _stopped_body(self, rng: random.Random) -> Attack:
        whole = self._wire.request(COMPLETIONS, b"a" * self._size)
        return Attack("stopped body", whole[: -rng.randint(1, 1000)], frozenset(), reads=False)

    def _strange_address(self, rng: random.Random) -> Attack:
        path = rng.choice((
            f"/v1/batches?limit={'9' * 5000}",
            f"/v1/responses/resp_{new_word(rng)}/input_items?limit={'9' * 5000}",
            f"/v1/files/file-{new_word(rng)}/content",
            f"/v1/models/{new_word(rng) * 1000}",
            "/v1/files/..%2f..%2fetc%2fpasswd/content",
        ))  # fmt: skip
        line = f"GET {path} HTTP/1.1\r\n{self._wire.head}range: bytes=9-1\r\n\r\n"
        return Attack("strange address", line.encode(), frozenset({400, 404}))

    def _many_answers(self, rng: random.Random) -> Attack:
        fields: Sequence[dict[str, Any]] = (
            {"n": 128, "max_tokens": 4, "logprobs": 20}, {"best_of": 128, "n": 1}, {"best_of": 2, "n": 3},
            {"best_of": 10**9}, {"n": 128, "logprobs": 20, "max_tokens": 2000}, {"logprobs": 10**6},
            {"prompt": ["a"] * 1024}, {"prompt": ["a"] * 1025}, {"prompt": [[]] * 9}, {"prompt": ["a"] * 512, "n": 16},
            {"echo": True, "logprobs": 20, "prompt": "a " * 900, "n": 4}, {"logprobs": -1}, {"prompt_logprobs": 20},
            {"stop": ["a" * 4096] * 64}, {"min_tokens": 10**6}, {"logit_bias": {str(i): -100 for i in range(4000)}},
        )  # fmt: skip
        body = {**_ASK, "stream": rng.random() < 0.3, **rng.choice(fields)}
        return self._wire.post("many answers", COMPLETIONS, body, SERVED_OR_REFUSED)

    def _many_parts(self, rng: random.Random) -> Attack:
        part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n\r\n'
        form = self._wire.request("/v1/files", part * rng.randint(17, 20_000), "multipart/form-data; boundary=b")
        return Attack("many parts", form, frozenset({400, 404, 415}))


def _chain(length: int, following: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """A schema with this number of definitions. `following` makes each one from a reference to the next."""
    definitions = {f"d{i}": following(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def _ollama_calls(count: int, salt: str) -> dict[str, Any]:
    calls = [{"function": {"name": f"{salt}{i}", "arguments": {}}} for i in range(2 * count - 2)]
    results = [{"role": "tool", "tool_name": "unknown", "content": "a"} for _ in calls]
    return {"messages": [{"role": "assistant", "tool_calls": calls}, *results], "options": {"num_predict": 1}}


def _response_calls(count: int, salt: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for i in range(count):
        items.append({"type": "function_call", "call_id": f"{salt}{i}", "name": "f", "arguments": "{}"})
        items.append({"type": "function_call_output", "call_id": f"{salt}{i}", "output": "a"})
    return {"input": items, "max_output_tokens": 1}


def _message_calls(count: int, salt: str) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for i in range(count):
        use = {"type": "tool_use", "id": f"{salt}{i}", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"{salt}{i}", "content": "a"}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": turns, "max_tokens": 1}
