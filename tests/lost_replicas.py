"""Answers while a replica behind a proxy ends: what its clients see, and what all others do not notice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import httpx

REPLICA = "x-tidewheel-replica"
_LONGEST = 1900  # tokens, which the embedded model's context has room for


@dataclass
class Stream:
    """What came of a streamed answer."""

    replica: str = ""
    text: str = ""
    error: dict[str, Any] | None = None
    lines: list[str] = field(default_factory=list)


def stream(http: httpx.Client, content: str, max_tokens: int, began: threading.Semaphore | None = None) -> Stream:
    """A streamed answer to a question; `began` is released with its first token."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    answer = Stream()
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        answer.replica = response.headers[REPLICA]
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                answer.error = event.get("error")
                for choice in event.get("choices", ()):
                    answer.text += choice["delta"].get("content") or ""
                if began is not None and answer.text:
                    began.release()
                    began = None
            answer.lines.append(line)
    return answer


def ask(http: httpx.Client, session: str, max_tokens: int = 8) -> tuple[str, str]:
    """The replica that answers a question of a session, and its text."""
    body = {"messages": [{"role": "user", "content": f"Hello, I am {session}"}], "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    response = http.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == max_tokens
    return response.headers[REPLICA], answer["choices"][0]["message"]["content"]


def lose_a_replica(http: httpx.Client, end: Callable[[], object], *, streams: int, length: int = 400) -> str:
    """The name of the replica that `end` ends while it streams, after a run in which nothing ends.

    Its streams must break off with an error that makes clients ask again. Answers that had sent nothing yet, such as
    those in one piece, must come from another replica. All texts must begin as in the first run.
    They are longer than there, so that none ends before the replica does. They are longer still if this process was too
    busy to notice in time that all had begun.
    """
    questions = [f"Tell me about the number {i}" for i in range(streams)]
    sessions = [f"session {i} that loses its replica" for i in range(16)]
    began = threading.Semaphore(0)
    with ThreadPoolExecutor(len(questions) + len(sessions)) as pool:
        asked = pool.map(lambda session: ask(http, session, length), sessions)
        whole = [*pool.map(lambda question: stream(http, question, length), questions)]
        assert all(answer.error is None and answer.lines[-2:] == ["data: [DONE]", ""] for answer in whole)
        expected = [*asked]
        for longer in (3 * length, *[_LONGEST] * 4):
            again = [pool.submit(ask, http, session, longer) for session in sessions]
            running = [pool.submit(stream, http, question, longer, began) for question in questions]
            for _ in questions:
                assert began.acquire(timeout=120)
            if not any(future.done() for future in (*again, *running)):
                break
            wait([*again, *running])
        else:
            raise AssertionError("the answers are too short for this machine")
        end()
        answers = [future.result() for future in running]
        repeated = [future.result() for future in again]
    broken = [answer for answer in answers if answer.error is not None]
    assert 0 < len(broken) < len(answers)
    (lost,) = {answer.replica for answer in broken}
    assert all(answer.replica != lost for answer in answers if answer.error is None)
    for before, after in zip(whole, answers, strict=True):
        if after.error is not None:
            assert (after.error["code"], after.lines[-2]) == ("replica_lost", "data: [DONE]")
        _check_same(before.text, after.text)
    assert lost in {replica for replica, _ in expected}  # where these sessions stay
    assert lost not in {replica for replica, _ in repeated}
    for (_, before_text), (_, after_text) in zip(expected, repeated, strict=True):
        assert len(after_text) >= len(before_text)
        _check_same(before_text, after_text)
    return lost


def _check_same(one: str, other: str) -> None:
    """The shorter text must begin the other. Its last character may be cut in the middle."""
    shorter, longer = sorted((one, other), key=len)
    assert longer.startswith(shorter.rstrip("\ufffd"))
