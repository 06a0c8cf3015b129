"""Sends hostile grammars to one Tidewheel for minutes. Each is answered or refused, and other clients are not affected.

    python load_tests/grammars.py --url http://127.0.0.1:8000

Clients send generated or malformed grammars of every kind: deep, long, ambiguous, endless. Meanwhile others request
/health, repeat a normal request, whose answer must stay the same, and read a stream, which must not stall. Exits with 1
and says what was wrong if any of this fails, if an attack gets any status but 200, 400, 413 or 429, or if the memory
keeps growing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from soak import Server
from verdict import verdict

Body = dict[str, Any]

_ALLOWED = (200, 400, 413, 429)
_SLOWEST_HEALTH_S = 5.0
_LONGEST_GAP_S = 5.0  # between two texts of a stream
_ASK = [{"role": "user", "content": "Describe yourself."}]
_HONEST: Body = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_REGEXES = ("a", "[a-z]", r"\d", ".", r"\w+", r"[^x]", "(ab|c)", r"\p{L}", "é", "(?i:k)", "[\\s\\S]", "", "|", "x*?")
_TYPES: tuple[Any, ...] = ("string", "integer", "number", "boolean", "null", "object", "array", ["string", "null"])
_SIZES = (0, 1, 2, 3, 17, 100, 999, 5000, 70_000, 10**6, 2**31, 2**40)


class Grammars:
    """Generates grammars from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fields(self) -> Body:
        """The fields of a request that ask for one."""
        pick = self._random
        kind = pick.choice([self._schemas, self._texts, self._tags, self._tools, self._choices])
        return kind()

    def _schemas(self) -> Body:
        schema = self._random.choice([lambda: self.schema(4), self._chain, self._circle, self._wide])()
        if self._random.random() < 0.2:
            schema = {**schema, "x-guidance": {"whitespace_pattern": self.regex(2)}}
        if self._random.random() < 0.3:
            return {"guided_json": self.mangled(json.dumps(schema))}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}

    def _texts(self) -> Body:
        kind = self._random.choice(["guided_regex", "guided_grammar", "guided_grammar"])
        text = self.regex(5) if kind == "guided_regex" else self._random.choice([self.rules, self._ambiguous])()
        return {kind: self.mangled(text) or "a"}

    def _tags(self) -> Body:
        return {"response_format": {"type": "structural_tag", "format": self.tag(3)}}

    def _tools(self) -> Body:
        count = self._random.randint(1, 8)
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": self.schema(3)}} for i in range(count)
        ]
        return {"tools": tools, "tool_choice": self._random.choice(["required", "auto"])}

    def _choices(self) -> Body:
        count = self._random.choice([1, 3, 500, 2001, 9000, 10_001])
        return {"guided_choice": [f"{self._random.randrange(10**9)} {'é' * (i % 3)}" for i in range(count)]}

    def schema(self, depth: int) -> Body:
        """A JSON schema."""
        pick = self._random
        if depth == 0 or pick.random() < 0.2:
            return pick.choice(
                [
                    {"type": pick.choice(_TYPES)},
                    {"$ref": pick.choice(["#", "#/$defs/a", "#/properties/p0", "https://example.com/x", "#/~1"])},
                    {"type": "string", "pattern": self.regex(3)},
                    {"type": "string", "minLength": pick.choice(_SIZES), "maxLength": pick.choice(_SIZES)},
                    {"type": "integer", "minimum": -pick.choice(_SIZES), "multipleOf": pick.choice(_SIZES) + 1},
                    {"enum": [pick.choice([None, 1, "a", 1.5, [], {}]) for _ in range(pick.randint(0, 40))]},
                    {"type": "string", "format": pick.choice(["date-time", "email", "uuid", "ipv6", "tide"])},
                    {},
                ]
            )
        below = [self.schema(depth - 1) for _ in range(pick.randint(1, 4))]
        made: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": "object", "properties": {f"p{i}": part for i, part in enumerate(below)}},
            lambda: {"patternProperties": {self.regex(2): part for part in below}},
            lambda: {"type": "array", "items": below[0], "maxItems": pick.choice(_SIZES)},
            lambda: {"type": "array", "prefixItems": below, "minItems": pick.choice(_SIZES)},
            lambda: {pick.choice(["anyOf", "oneOf", "allOf"]): below * pick.choice([1, 1, 30])},
            lambda: {"$defs": {"a": below[0]}, "properties": {"p0": below[-1], "p1": {"$ref": "#/$defs/a"}}},
            lambda: {"additionalProperties": below[0], "not": below[-1]},
        ]
        return pick.choice(made)()

    def _chain(self) -> Body:
        count = self._random.choice([10, 100, 250, 300, 1000, 3000])
        keyword = self._random.choice(["items", "additionalProperties", "$ref"])
        parts: Body = {}
        for i in range(count):
            ref = f"#/$defs/{i + 1}"
            parts[str(i)] = {"$ref": ref} if keyword == "$ref" else {keyword: {"$ref": ref}}
        return {"$ref": "#/$defs/0", "$defs": {**parts, str(count): self.schema(1)}}

    def _circle(self) -> Body:
        count = self._random.randint(1, 40)
        refs = [{"$ref": f"#/$defs/d{self._random.randrange(count)}"} for _ in range(30)]
        return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"anyOf": [*refs, {"type": "null"}]} for i in range(count)}}

    def _wide(self) -> Body:
        count = self._random.choice([100, 400, 600, 3000])
        return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}

    def regex(self, depth: int) -> str:
        """A regular expression."""
        pick = self._random
        if depth == 0:
            return pick.choice(_REGEXES)
        parts = [self.regex(depth - 1) for _ in range(pick.randint(1, 3))]
        low, high = pick.choice(_SIZES), pick.choice(_SIZES)
        return pick.choice(
            [
                "".join(parts),
                "|".join(parts),
                f"({parts[0]})*",
                f"({parts[0]}){{{low}}}",
                f"({parts[0]}){{{low},{high}}}",
                f"({'|'.join(parts)})*a({parts[0]}){{{pick.choice([5, 20, 200])}}}",
                "(" * pick.choice([1, 90, 5000]) + parts[0],
            ]
        )

    def rules(self) -> str:
        """A grammar in Lark or EBNF."""
        pick, count = self._random, self._random.choice([1, 3, 20, 250, 300, 3000])
        is_ebnf = pick.random() < 0.4
        sign, first = ("::=", "root") if is_ebnf else (":", "start")
        far = pick.random() < 0.5  # each refers to the next, or to any

        def part(i: int) -> str:
            name = f"r{min(i + 1, count - 1) if far else pick.randrange(count)}"
            own = [
                f'"{pick.choice("abc")}"', "[a-z]", f'("x" {name})*', f"{name}?", f'({name} | "b")',
                f'({name} "y"){{{pick.choice(_SIZES)}}}',
            ]  # fmt: skip
            if not is_ebnf:
                own[1] = f"/{self.regex(2)}/" if count <= 20 else "/[a-z]+/"
            return " ".join([name if far else "", *pick.sample(own, 2)])

        lines = [
            f"r{i} {sign} {part(i)} | {part(i)}" if count < 1000 else f"r{i} {sign} {part(i)}" for i in range(count)
        ]
        if not is_ebnf and pick.random() < 0.2:
            lines.append(f"r0: %json {json.dumps(self._chain())}")
        return "\n".join([f"{first} {sign} r0", *lines])

    def _ambiguous(self) -> str:
        pick = self._random
        ways = [" ".join(pick.choice(["e", '"a"', '"b"', "e e"]) for _ in range(pick.randint(1, 4))) for _ in range(5)]
        return "start: e\ne: " + " | ".join([*ways, '"a"', '"b"', "/[a-z]+/"])

    def tag(self, depth: int) -> Body:
        """A structural tag."""
        pick = self._random
        if depth == 0:
            return pick.choice(
                [
                    {"type": "any_text"},
                    {"type": "const_string", "value": "a" * pick.choice([1, 1000])},
                    {"type": "regex", "pattern": self.regex(3)},
                    {"type": "json_schema", "json_schema": self.schema(2)},
                    {"type": "grammar", "grammar": self.rules()},
                    {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": self._circle()}}},
                    {
                        "type": "qwen_xml_parameter",
                        "json_schema": {**self._circle(), "properties": {"a": {"$ref": "#"}}},
                    },
                ]
            )
        below = [self.tag(depth - 1) for _ in range(pick.randint(0, 3))]
        tags = [{"type": "tag", "begin": f"<{i}>", "content": part, "end": "</>"} for i, part in enumerate(below)]
        return pick.choice(
            [
                {"type": "sequence", "elements": below},
                {"type": "or", "elements": below},
                {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "at_least_one": pick.random() < 0.5},
                {"type": "tags_with_separator", "tags": tags, "separator": ",", "at_most": pick.choice(_SIZES) + 1},
            ]
        )

    def mangled(self, text: str) -> str:
        """The text, half of the time with pieces removed, doubled or changed."""
        pick = self._random
        for _ in range(pick.choice([0, 0, 0, 1, 2, 8])):
            start = pick.randrange(len(text) + 1)
            end = start + pick.choice([1, 3, 30])
            piece = pick.choice(["", text[start:end] * 2, pick.choice('()[]{}|"\\/\n:*'), text[start:end][::-1]])
            text = text[:start] + piece + text[end:]
        return text[:250_000]


class Attack:
    """The clients, their counts, and what was wrong."""

    def __init__(self, client: httpx.AsyncClient, model: str, options: argparse.Namespace) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest: Counter[str] = Counter()  # milliseconds
        self._client = client
        self._model = model
        self._options = options
        self._until = time.monotonic() + options.seconds

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self._until and not self.wrong

    async def hostile(self, client: int) -> None:
        """One client that sends grammars."""
        made = Grammars(self._options.seed * 1000 + client)
        while self.goes_on:
            fields = made.fields()
            body = {"messages": _ASK, "max_tokens": 64, "temperature": 1.2, "seed": 1, "ignore_eos": True, **fields}
            response = await self._post(body)
            self.outcomes[str(response.status_code)] += 1
            if response.status_code not in _ALLOWED:
                name = f"attack-{client}-{int(time.time())}.json"
                await asyncio.to_thread(Path(name).write_text, json.dumps(body), encoding="utf-8")
                self.wrong.append(f"{response.status_code} {response.text[:200]} (its body is in {name})")
            elif response.status_code == 429:
                await asyncio.sleep(0.2)

    async def honest(self) -> None:
        """One client that repeats the same request, sometimes with a new grammar."""
        expected: Any = None
        count = 0
        while self.goes_on:
            count += 1
            named = {**_HONEST, "title": f"{count // 5}"}
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": named}}
            body = {"messages": _ASK, "max_tokens": 64, "seed": 3, "response_format": form}
            response = await self._timed("honest", lambda body=body: self._post(body))  # type: ignore[misc]
            if response.status_code == 429:
                self.outcomes["honest, told to wait"] += 1
                await asyncio.sleep(1)
                continue
            if response.status_code != 200:
                self.wrong.append(f"an honest request got {response.status_code} {response.text[:200]}")
                return
            choices = response.json()["choices"]
            expected = expected or choices
            if choices != expected:
                self.wrong.append(f"an honest answer changed from {expected} to {choices}")
            self.outcomes["honest"] += 1

    async def healthy(self) -> None:
        """One client that requests `/health`."""
        while self.goes_on:
            response = await self._timed("health", lambda: self._client.get("/health"))
            if response.status_code != 200 or self.slowest["health"] > _SLOWEST_HEALTH_S * 1e3:
                self.wrong.append(f"/health said {response.status_code} after {self.slowest['health']} ms")
            await asyncio.sleep(0.2)

    async def steady(self) -> None:
        """One client that reads plain streamed answers."""
        # Special tokens are shown, because a token without text is not sent and would look like a stall.
        spoken = {"max_tokens": 1000, "temperature": 1.0, "ignore_eos": True, "skip_special_tokens": False}
        body = {"model": self._model, "messages": _ASK, "stream": True, **spoken}
        while self.goes_on:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                last: float | None = None
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    gap = 0.0 if last is None else now - last
                    last = now
                    self.slowest["gap"] = max(self.slowest["gap"], int(gap * 1e3))
                    if gap > _LONGEST_GAP_S:
                        self.wrong.append(f"a stream stood still for {gap:.1f} s")
                status = response.status_code
            if status == 429:
                await asyncio.sleep(1)
            elif status != 200:
                self.wrong.append(f"a stream was answered with {status}")

    async def _post(self, body: Body) -> httpx.Response:
        return await self._client.post("/v1/chat/completions", json={"model": self._model, **body})

    async def _timed(self, name: str, call: Callable[[], Any]) -> httpx.Response:
        started = time.monotonic()
        response: httpx.Response = await call()
        self.slowest[name] = max(self.slowest[name], int((time.monotonic() - started) * 1e3))
        return response


async def run(options: argparse.Namespace) -> list[str]:
    """Run the attack. Returns what was wrong."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=options.clients + 8)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=120, limits=limits, trust_env=False
    ) as client:
        model = options.model or (await client.get("/v1/models")).json()["data"][0]["id"]
        server, attack = Server(client), Attack(client, model, options)
        clients = [attack.hostile(i) for i in range(options.clients)]
        tasks = [asyncio.create_task(work) for work in (*clients, attack.honest(), attack.healthy(), attack.steady())]
        started, steady = time.monotonic(), 0.0
        while attack.goes_on:
            await asyncio.wait(tasks, timeout=min(10.0, options.seconds / 8), return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() is not None for task in tasks):
                break
            elapsed, memory = time.monotonic() - started, await server.memory_mib()
            if not steady and elapsed >= options.seconds / 4:
                steady = memory
            print(
                f"{elapsed:6.0f} s  {memory:8.1f} MiB  {dict(attack.outcomes)}  ms: {dict(attack.slowest)}", flush=True
            )
        await asyncio.gather(*tasks)
        await server.check_idle()
        memory = await server.memory_mib()
        if steady and memory - steady > options.max_growth_mib:
            attack.wrong.append(f"memory grew from {steady:.1f} to {memory:.1f} MiB after the first quarter")
        return attack.wrong


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is [%(default)s]")
    parser.add_argument("--seconds", type=float, default=600, help="how long the attack lasts [%(default)s]")
    parser.add_argument("--clients", type=int, default=6, help="hostile clients at a time [%(default)s]")
    parser.add_argument(
        "--max-growth-mib",
        type=float,
        default=384,
        help="memory that may be gained after the first quarter: what grammars may take in all [%(default)s]",
    )
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="model to ask for [the first served]")
    parser.add_argument("--api-key", default=os.environ.get("API_KEY"), help="sent as a bearer token [none]")
    parser.add_argument("--seed", type=int, default=0, help="of the grammars [%(default)s]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and say what was wrong; 1 if anything was."""
    options = parse(arguments)
    return verdict(lambda: asyncio.run(run(options)))


if __name__ == "__main__":
    sys.exit(main())
