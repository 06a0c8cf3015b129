"""A client that sends much delays itself, not others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from server.conftest import StartServer
from server.raw_http import post_raw
from server.waiting import eventually

COMPLETIONS = "/v1/completions"


def test_a_short_prompt_is_computed_before_the_many_of_another_client(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    executor, opened = server.engine.executor, threading.Event()
    computed: list[int] = []  # the lengths of the prompts, in order of their ends

    def step(batch: Any, run: Any = executor.step) -> Any:
        opened.wait(20)
        computed.extend((batch.positions[batch.logits_rows] + 1).tolist())
        return run(batch)

    monkeypatch.setattr(executor, "step", step)
    lengths = range(3000, 3010)
    streams = []
    for count, length in enumerate(lengths, 1):
        prompt = f"{count} ".ljust(length - 1, "x")  # the server puts a token before it
        streams.append(post_raw(server, {"prompt": prompt, "max_tokens": 1}))
        eventually(lambda count=count: len(server.engine.requests) == count, "it never came in")  # type: ignore[misc]
    with server.another_client() as other:
        thread = threading.Thread(
            target=other.post, args=(COMPLETIONS,), kwargs={"json": {"prompt": "a", "max_tokens": 1}}
        )
        thread.start()
        eventually(lambda: len(server.engine.requests) > len(lengths), "it never came in")
        opened.set()
        thread.join(20)
    for stream in streams:
        assert stream.recv(12) == b"HTTP/1.1 200"
        stream.close()
    assert 2 in computed[:2], "only the first, which ran already, is done before"
    assert [length for length in computed if length != 2] == list(lengths)
