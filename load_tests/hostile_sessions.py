"""Hostile clients that send several requests: each is a session, in which later requests need earlier ones."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
from attack import CHAT, COMPLETIONS, NO_FAILURE, new_word
from hostile_adapters import LOAD, UNLOAD, AdapterFolder
from storm import Storm

_TIMEOUT_S = 120
_BUSY = frozenset({429, 503})
_CROWD = 5  # times the size of a session
_TRIES, _PAUSE_S = 50, 0.1
_FAILING_ROW = {"method": "POST", "url": COMPLETIONS, "body": {"unknown": 1, "priority": -(10**6)}}


class Sessions:
    """Sessions with the server of `storm`, which collects what was wrong. `size` is the number of requests of long
    sessions.
    """

    def __init__(self, storm: Storm, client: httpx.AsyncClient, adapters: AdapterFolder, size: int) -> None:
        self._storm, self._client, self._adapters, self._size = storm, client, adapters, size
        self._adapted: Any = None  # the answer with the good adapter
        self.kinds: Sequence[Callable[[random.Random], Awaitable[None]]] = (
            self.batches, self.many_files, self.chain_of_responses, self.background, self.good_adapter,
            self.changing_adapter, self.structured, self.hang_ups, self.unread_streams,
        )  # fmt: skip

    async def run(self, clients: int, rng: random.Random, stopped: asyncio.Event) -> None:
        """Run `clients` clients, each with one session after the other, until the event."""

        async def client(rng: random.Random) -> None:
            while not stopped.is_set():
                await self.hold(rng.choice(self.kinds), rng)

        await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(clients)))

    async def hold(self, kind: Callable[[random.Random], Awaitable[None]], rng: random.Random) -> None:
        """One session."""
        with self._storm.noted(f"session: {kind.__name__}"):
            await kind(rng)

    async def batches(self, rng: random.Random) -> None:
        """Batches that end at once while their file is deleted."""
        rows = "".join(json.dumps({"custom_id": str(i), **_FAILING_ROW}) + "\n" for i in range(3))
        file = await self._upload(rows.encode())
        if file is None:
            return
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        made = [self._ask("POST", "/v1/batches", body) for _ in range(self._size)]
        deleted = self._ask("DELETE", f"/v1/files/{file}")
        answers = (await asyncio.gather(*made[: self._size // 2], deleted, *made[self._size // 2 :]))[::-1]
        ids = [answer["id"] for answer in answers if answer and answer.get("object") == "batch"]
        await asyncio.gather(*(self._ask("POST", f"/v1/batches/{id}/cancel", {}) for id in ids[::3]))
        for id in ids[:5]:
            batch = await self._ask("GET", f"/v1/batches/{id}") or {}
            for name in ("output_file_id", "error_file_id"):
                if found := batch.get(name):
                    await asyncio.gather(
                        self._ask("GET", f"/v1/files/{found}/content", plain=True),
                        self._ask("DELETE", f"/v1/files/{found}"),
                    )

    async def many_files(self, rng: random.Random) -> None:
        """Simultaneous uploads, and deletion of all existing files."""
        uploads = [self._upload(b"{}\n" * rng.randint(0, 1000)) for _ in range(self._size)]
        listed = self._ask("GET", "/v1/files?limit=100")
        files, *_ = await asyncio.gather(listed, *uploads)
        ids = [file["id"] for file in (files or {}).get("data", ())]
        await asyncio.gather(*(self._ask("DELETE", f"/v1/files/{id}") for id in ids))

    async def chain_of_responses(self, rng: random.Random) -> None:
        """A long conversation of stored responses, of which one in the middle is deleted."""
        ids: list[str] = []
        for _ in range(self._size):
            body = {
                "input": rng.choice((new_word(rng), [{"role": "user", "content": "a"}] * 200)),
                "previous_response_id": rng.choice(ids[-2:]) if ids else None,
                "max_output_tokens": 2,
                "metadata": {f"{i}": "a" * 512 for i in range(16)},
            }
            answer = await self._ask("POST", "/v1/responses", body)
            if answer and "id" in answer:
                ids.append(answer["id"])
        for id in ids[::4]:
            path = f"/v1/responses/{id}"
            await asyncio.gather(
                self._ask("GET", f"{path}/input_items?limit=100"),
                self._ask("DELETE", path),
                self._ask("GET", path),
                self._ask("POST", "/v1/responses", {"input": "a", "previous_response_id": id, "max_output_tokens": 1}),
            )

    async def background(self, rng: random.Random) -> None:
        """Background responses, which are read, cancelled and deleted while they are computed."""
        body = {"input": new_word(rng), "background": True, "max_output_tokens": 200}
        made = await asyncio.gather(*(self._ask("POST", "/v1/responses", body) for _ in range(8)))
        for path in [f"/v1/responses/{answer['id']}" for answer in made if answer and "id" in answer]:
            asked = [("GET", path), ("POST", f"{path}/cancel"), ("DELETE", path), ("GET", f"{path}?stream=true")]
            rng.shuffle(asked)
            await asyncio.gather(*(self._ask(method, at, plain="stream" in at) for method, at in asked))

    async def good_adapter(self, rng: random.Random) -> None:
        """An adapter that is loaded and unloaded while requests use it: every answer must be right."""
        name, body = new_word(rng), {"prompt": "The tide", "max_tokens": 8, "temperature": 0, "logprobs": 1}
        loaded = await self._ask("POST", LOAD, {"lora_name": name, "lora_path": str(self._adapters.good)}, plain=True)
        if loaded is None:
            return
        ask, unload = {**body, "model": name}, {"lora_name": name}
        answers = [await self._ask("POST", COMPLETIONS, ask)]
        *more, _, late = await asyncio.gather(
            *(self._ask("POST", COMPLETIONS, ask) for _ in range(3)),
            self._ask("POST", UNLOAD, unload, plain=True),
            self._ask("POST", COMPLETIONS, ask),
        )
        for answer in (*answers, *more, late):
            if answer and "choices" in answer:
                self._adapted = self._adapted or answer["choices"]
                if answer["choices"] != self._adapted:
                    self._storm.wrong.append(f"with an adapter: {answer['choices']} instead of {self._adapted}")

    async def changing_adapter(self, rng: random.Random) -> None:
        """An adapter whose files are repeatedly rewritten while it is loaded."""
        copy = self._adapters.folder.parent / new_word(rng)
        await asyncio.to_thread(shutil.copytree, self._adapters.good, copy)
        weights = copy / "adapter_model.safetensors"
        content = weights.read_bytes()
        name = new_word(rng)
        load = asyncio.ensure_future(
            self._ask("POST", LOAD, {"lora_name": name, "lora_path": str(copy)}, plain=True, allowed=NO_FAILURE)
        )
        while not load.done():
            await asyncio.to_thread(weights.write_bytes, content[: rng.randrange(len(content) + 1)])
        await self._ask("POST", UNLOAD, {"lora_name": name}, plain=True)
        await asyncio.to_thread(shutil.rmtree, copy)

    async def structured(self, rng: random.Random) -> None:
        """A well-behaved client with a new grammar each time: it gets its answer, even if later."""
        word = new_word(rng)
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 64, "guided_regex": f"(yes|no) {word}"}
        for _ in range(_TRIES):
            answer = await self._ask("POST", CHAT, body, allowed=frozenset({200}) | _BUSY)
            if answer and "choices" in answer:
                text = answer["choices"][0]["message"]["content"]
                if not re.fullmatch(f"(yes|no) {word}", text):
                    self._storm.wrong.append(f"an answer of (yes|no) {word} was {text!r}")
                return
            await asyncio.sleep(_PAUSE_S)
        self._storm.wrong.append(f"no answer to a grammar in {_TRIES} tries")

    async def hang_ups(self, rng: random.Random) -> None:
        """Many clients that disconnect at the same moment, in the middle of their streams."""
        await asyncio.gather(*(self._storm.leave(rng) for _ in range(_CROWD * self._size)))

    async def unread_streams(self, rng: random.Random) -> None:
        """Many clients that do not read their streams."""
        await asyncio.gather(*(self._storm.stall(rng) for _ in range(self._size)))

    async def _upload(self, content: bytes) -> str | None:
        answer = await self._ask("POST", "/v1/files", files={"file": ("a", content), "purpose": (None, "batch")})
        return answer.get("id") if answer else None

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        allowed: frozenset[int] = NO_FAILURE,
        plain: bool = False,
        **options: Any,
    ) -> Any:
        """The answer to a request, with `plain` its text; None if it is refused."""
        try:
            response = await self._client.request(method, path, json=body, timeout=_TIMEOUT_S, **options)
        except httpx.HTTPError as error:
            self._storm.wrong.append(f"{method} {path}: {error!r}")
            return None
        if response.status_code not in allowed:
            self._storm.wrong.append(f"{method} {path}: {response.status_code} {response.text[:300]}")
        if response.status_code != 200:
            return None
        return response.text if plain else response.json()


async def drip(storm: Storm, clients: int, pause_s: float, rng: random.Random, stopped: asyncio.Event) -> None:
    """Run `clients` clients that send a byte of their request every `pause_s`, until the event."""

    async def client(rng: random.Random) -> None:
        while not stopped.is_set():
            await storm.drip(rng, pause_s, stopped)

    await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(clients)))
