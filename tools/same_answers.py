"""Ask two servers the same questions with the `openai` package: greedy tokens must be the same, logprobs nearly.

Usage: python tools/same_answers.py http://127.0.0.1:8000 http://127.0.0.1:8001
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from openai import BadRequestError, OpenAI

QUESTIONS = (
    "Who are you?",
    "How do I serve another model?",
    "What is 7 plus 5?",
    "Tell me a story about the sea.",
    "Ünïcödé: 你好, мир 🌊?",
)
PROMPTS = ("The tide turns", "Once upon a time", "1, 2, 3,")
MAX_TOKENS = 48
# For float32 sums in another order, with logits of some tens.
LOGPROB_TOLERANCE = 1e-3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}

Answer = list[tuple[str, float]]
"""The tokens of an answer, each with its logprob."""


def wait_for(url: str, timeout_s: float) -> None:
    """Return when the server answers its health check. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=30):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not answer within {timeout_s:.0f} s: {error}") from error
        time.sleep(0.5)


def chat(client: OpenAI, question: str) -> Answer:
    whole = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=True,
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    return [(token.token, token.logprob) for token in logprobs.content or ()]


def streamed_chat(client: OpenAI, question: str) -> Answer:
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=True,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    return [(t.token, t.logprob) for choice in choices if choice.logprobs for t in choice.logprobs.content or ()]


def completion(client: OpenAI, prompt: str) -> Answer:
    whole = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=prompt,
        temperature=0,
        max_tokens=MAX_TOKENS,
        logprobs=1,
        echo=True,
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    return [
        (token, logprob or 0.0)
        for token, logprob in zip(logprobs.tokens or (), logprobs.token_logprobs or (), strict=True)
    ]


def structured(client: OpenAI) -> str:
    """An answer that follows a schema, or why there is none."""
    try:
        whole = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Who are you?"}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
    except BadRequestError as error:
        return str(error)
    return whole.choices[0].message.content or ""


def difference(one: Answer, other: Answer) -> float:
    """The greatest difference of logprobs. Raises ValueError if the tokens differ."""
    if [token for token, _ in one] != [token for token, _ in other]:
        raise ValueError(f"the tokens differ:\n  {one}\n  {other}")
    if not one:
        raise ValueError("no tokens came")
    return max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs=2, metavar="URL")
    parser.add_argument("--wait", type=float, default=300, metavar="SECONDS", help="for the servers to start")
    arguments = parser.parse_args()
    clients = []
    for url in arguments.urls:
        wait_for(url, arguments.wait)
        clients.append(OpenAI(base_url=url + "/v1", api_key="none", timeout=600, max_retries=0))
    asked: list[tuple[Callable[[OpenAI, str], Answer], str]] = []
    asked += [(ask, question) for question in QUESTIONS for ask in (chat, streamed_chat)]
    asked += [(completion, prompt) for prompt in PROMPTS]
    failures = 0
    for ask, text in asked:
        answers = [ask(client, text) for client in clients]
        try:
            worst = difference(*answers)
        except ValueError as error:
            failures += 1
            print(f"{ask.__name__} {text!r}: {error}")
            continue
        close = worst <= LOGPROB_TOLERANCE
        failures += not close
        print(f"{ask.__name__} {text!r}: {len(answers[0])} tokens, logprobs within {worst:.1e}{'' if close else ' !'}")
    for client, url in zip(clients, arguments.urls, strict=True):
        print(f"structured output of {url}: {structured(client)}")
    return failures > 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
