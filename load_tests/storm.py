"""Many requests at once, some from misbehaving clients. The others must get the same answers as when they run alone.

Tidewheel's answer depends only on the request. So each request is first sent alone, and its answer is kept. Then many
run at once: some clients disconnect, some read slowly, some never finish their request, some send nonsense. Every
answer that is read completely must equal the kept one, to the last bit of its log-probabilities. With `attacks`, some
clients are hostile, and each attack must get one of its allowed statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from attack import Attack
from hostile import Attacks
from sse import EventParser

_WORDS = (
    "tide wheel mill river stone grain water turn slow deep light wind harbour salt moon pull rope boat rise fall "
    "count every grain of sand before dawn and name the ships that pass"
).split()
_PREFIX = "All of these requests begin with the same words, so that they share what the cache holds of them. "
_READ_TIMEOUT_S = 120
_NOTED = 200_000
_LARGE_BYTES = 2**20  # of a request; two such at a time leave the client time to read its answers

Answer = list[dict[str, Any]]


class StormError(Exception):
    """A server that does not answer as it should."""


@dataclass
class Storm:
    """Requests of `cases` kinds to the server at `url`.

    `outcomes` counts the clients by how they behaved, `wrong` says what was wrong about answers. With `attacks`,
    `hostile_share` of the clients make one. `done` has when the last of these began and ended, on `perf_counter`.
    """

    url: str
    model: str
    cases: int = 40
    longest_answer: int = 24
    api_key: str | None = None
    seed: int = 0
    attacks: Attacks | None = None
    hostile_share: float = 1 / 3
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    done: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=_NOTED))

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._rng = random.Random(self.seed)
        self._bodies = [self._body(i) for i in range(self.cases)]
        self._alone: list[Answer] = []
        self._large = asyncio.Semaphore(2)

    async def learn(self) -> None:
        """Send every case alone, twice, so that the second time much of it comes from the cache."""
        for body in self._bodies:
            first, second = [await self._ask(body, streamed=streamed) for streamed in (False, True)]
            if first != second:
                raise StormError(f"a request got two answers, alone: {json.dumps(body)}")
            self._alone.append(first)

    async def run(self, requests: int, concurrency: int) -> None:
        """Send `requests` requests, `concurrency` at a time."""
        left = iter(range(requests))

        async def client(rng: random.Random) -> None:
            for _ in left:
                await self._one(rng)

        await asyncio.gather(*(client(random.Random(self._rng.random())) for _ in range(concurrency)))

    async def stream(self, streams: int, stopped: asyncio.Event) -> None:
        """Run `streams` well-behaved clients: each reads one streamed answer after the other until the event."""

        async def client(rng: random.Random) -> None:
            while not stopped.is_set():
                await self._check(rng.randrange(self.cases), "steady", streamed=True)

        await asyncio.gather(*(client(random.Random(self._rng.random())) for _ in range(streams)))

    async def _check(self, case: int, kind: str, **how: Any) -> None:
        """Send a request, and compare the answer with the kept one."""
        try:
            answer = await self._ask(self._bodies[case], **how)
        except StormError as error:
            self.wrong.append(f"{kind}: {error}")
        else:
            if answer != self._alone[case]:
                body = json.dumps(self._bodies[case])
                self.wrong.append(f"{kind}: {answer} instead of {self._alone[case]} for {body}")
        self.outcomes[kind] += 1

    async def _one(self, rng: random.Random) -> None:
        if self.attacks is not None and rng.random() < self.hostile_share:
            await self.attack(self.attacks.pick(rng))
            return
        case = rng.randrange(self.cases)
        body = self._bodies[case]
        kind = rng.choices(
            ("whole", "streamed", "slow", "leaves", "does not read", "never asks", "nonsense"), (4, 6, 2, 4, 1, 1, 1)
        )[0]
        if kind in ("whole", "streamed", "slow"):
            await self._check(case, kind, streamed=kind != "whole", pause_s=0.002 if kind == "slow" else 0.0)
            return
        with self.noted(kind):
            if kind == "leaves":
                await self.leave(rng)
            elif kind == "does not read":
                await self.stall(rng)
            elif kind == "never asks":
                await self._half_ask(body, rng)
            else:
                await self._talk_nonsense(rng)

    def _body(self, index: int) -> dict[str, Any]:
        rng = self._rng
        words = " ".join(rng.choices(_WORDS, k=rng.randint(1, 12)))
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": f"{_PREFIX if rng.random() < 0.5 else ''}{index} {words}",
            "max_tokens": rng.randint(1, self.longest_answer),
            "temperature": rng.choice((0, 0.7, 1.5)),
            "seed": rng.randrange(2**32),
            "n": rng.choice((1, 1, 2)),
            "ignore_eos": True,
            "priority": rng.choice((0, 0, 1)),
        }
        if rng.random() < 0.5:
            body["logprobs"] = 2
        return body

    async def _ask(self, body: dict[str, Any], *, streamed: bool, pause_s: float = 0.0) -> Answer:
        """The choices of a complete answer, in the same form whether it was streamed or not."""
        reader, writer = await self._connect(self._request({**body, "stream": streamed}))
        try:
            raw = bytearray()
            while piece := await asyncio.wait_for(reader.read(2048 if pause_s else 2**16), _READ_TIMEOUT_S):
                raw += piece
                if pause_s:
                    await asyncio.sleep(pause_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise StormError(f"the answer broke off: {error!r}") from error
        finally:
            writer.close()
        head, _, content = bytes(raw).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise StormError(f"{head[:40]!r} {content[:300]!r}")
        if not streamed:
            return [_shape([choice]) for choice in json.loads(content)["choices"]]
        *events, last = EventParser().feed(_unchunked(content))
        if last != "[DONE]":
            raise StormError(f"a stream ended with {last[:300]}")
        pieces: dict[int, list[dict[str, Any]]] = {i: [] for i in range(body["n"])}
        for event in map(json.loads, events):
            if "error" in event:
                raise StormError(f"a stream failed: {event['error']}")
            for choice in event["choices"]:
                pieces[choice["index"]].append(choice)
        return [_shape(parts) for parts in pieces.values()]

    @contextlib.contextmanager
    def noted(self, kind: str) -> Iterator[None]:
        """Counts what is done in the context, and notes when it was done and what was wrong."""
        began = time.perf_counter()
        try:
            yield
        except StormError as error:
            self.wrong.append(f"{kind}: {error}")
        self.outcomes[kind] += 1
        self.done.append((began, time.perf_counter(), kind))

    async def leave(self, rng: random.Random) -> None:
        """Disconnect at some point between the request and the end of its answer."""
        body = rng.choice(self._bodies)
        reader, writer = await self._connect(self._request({**body, "stream": rng.random() < 0.7}))
        with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            await asyncio.wait_for(reader.readexactly(rng.choice((1, 300, 1500))), rng.random() * 0.05)
        writer.transport.abort() if rng.random() < 0.5 else writer.close()

    async def stall(self, rng: random.Random) -> None:
        """Request a long answer, read nothing of it for a while, and disconnect."""
        long = {**rng.choice(self._bodies), "stream": True, "max_tokens": 10 * self.longest_answer, "logprobs": 2}
        _, writer = await self._connect(self._request(long), small_buffer=True)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(rng.random() * 0.3)
        writer.transport.abort()

    async def drip(self, rng: random.Random, pause_s: float, stopped: asyncio.Event) -> None:
        """Send a byte of a request, and another one after every pause, until the server disconnects or the event."""
        request = self._request(rng.choice(self._bodies))
        sent = rng.randrange(len(request))
        with self.noted("drips"):
            reader, writer = await self._connect(request[:sent])
            with contextlib.suppress(OSError):
                while sent < len(request) and not (stopped.is_set() or writer.is_closing() or reader.at_eof()):
                    writer.write(request[sent : sent + 1])
                    sent += 1
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(stopped.wait(), pause_s)
            writer.close()

    async def _half_ask(self, body: dict[str, Any], rng: random.Random) -> None:
        """Send only the beginning of a request."""
        request = self._request(body)
        _, writer = await self._connect(request[: rng.randrange(len(request))])
        await asyncio.sleep(rng.random() * 0.1)
        writer.close()

    async def _talk_nonsense(self, rng: random.Random) -> None:
        request = rng.choice((b"\x16\x03\x01", self._request({"prompt": 1}), self._request({"prompt": "a", "n": -1})))
        reader, writer = await self._connect(request)
        with contextlib.suppress(OSError):
            status = (await asyncio.wait_for(reader.readline(), _READ_TIMEOUT_S)).split(b" ")[1:2]
            if status != [b"400"]:
                self.wrong.append(f"nonsense was answered with {status}")
        writer.close()

    async def attack(self, attack: Attack) -> None:
        """Send the attack, and note what is wrong about the answer."""
        async with self._large if len(attack.sent) > _LARGE_BYTES else contextlib.nullcontext():
            with self.noted(f"hostile: {attack.name}"):
                status = await self._answer_to(attack)
                if status is not None and status not in attack.allowed:
                    raise StormError(f"answered with {status}: {attack.sent[:300]!r}")

    async def _answer_to(self, attack: Attack) -> int | None:
        """The status of the answer to an attack, None where none is read. Raises StormError if there is none."""
        reader, writer = await self._connect(attack.sent, small_buffer=not attack.reads)
        try:
            if not attack.reads:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(0.2)
                return None
            if attack.half_closes:
                writer.write_eof()
            status = (await asyncio.wait_for(reader.readline(), _READ_TIMEOUT_S)).split(b" ")[1:2]
            while await asyncio.wait_for(reader.read(2**16), _READ_TIMEOUT_S):
                pass
            return int(status[0])
        except ConnectionError as error:
            raise StormError(f"the connection broke: {error!r}") from error
        except (IndexError, ValueError, asyncio.TimeoutError) as error:
            raise StormError(f"no answer: {error!r}") from error
        finally:
            writer.transport.abort()

    async def _connect(
        self, request: bytes, *, small_buffer: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if small_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(connection, self._address)
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError as error:
            connection.close()
            raise StormError(f"no connection: {error}") from error
        writer.write(request)
        return reader, writer

    def _request(self, body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address[0]}\r\nconnection: close\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


def _shape(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice's pieces, merged."""
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    return {
        "text": "".join(part["text"] for part in parts),
        "tokens": [token for piece in logprobs for token in piece["tokens"]],
        "logprobs": [value for piece in logprobs for value in piece["token_logprobs"]],
        "finish_reason": parts[-1]["finish_reason"] if parts else None,
    }


def _unchunked(content: bytes) -> bytes:
    """A body of HTTP chunks as one. Raises StormError if its end is missing."""
    whole, rest = bytearray(), content
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            return bytes(whole)
        length = int(size, 16)
        whole += rest[:length]
        rest = rest[length + 2 :]
    raise StormError("a stream was cut off")
