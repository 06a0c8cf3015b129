"""The server under load: which model it serves, and requests of a given size for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import httpx

# Short and frequent, so that most tokenizers spend about one token on each.
WORDS = (
    "the of and to in is that it was for on are with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know"
).split()


class TargetError(Exception):
    """A server that does not tell what the load tests need to know."""


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server and one of its models.

    `words_per_token` and `overhead_tokens` were measured on a completion and hold for its tokenizer.
    """

    base_url: str
    api_key: str | None
    model: str
    words_per_token: float
    overhead_tokens: float

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return _headers(self.api_key)

    def prompt(self, tokens: int, rng: random.Random) -> str:
        """Random words of about `tokens` tokens. No two prompts share a prefix that could be cached."""
        count = max(1, round((tokens - self.overhead_tokens) * self.words_per_token))
        # The same words, all equally often, in another order: the same length with any tokenizer.
        words = [word for _ in range(0, count, len(WORDS)) for word in rng.sample(WORDS, len(WORDS))]
        return " ".join(words[:count])

    def completion(self, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> dict[str, Any]:
        """The body of a streamed `/v1/completions` request."""
        return {"prompt": prompt, **self._common(max_tokens, ignore_eos)}

    def chat(self, prompt: str | list[dict[str, Any]], max_tokens: int, *, ignore_eos: bool = False) -> dict[str, Any]:
        """The body of a streamed `/v1/chat/completions` request with one user message: a text, or parts."""
        return {"messages": [{"role": "user", "content": prompt}], **self._common(max_tokens, ignore_eos)}

    def _common(self, max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            # vLLM's, llama.cpp's and Tidewheel's name; a server that only knows OpenAI's fields refuses it.
            body["ignore_eos"] = True
            # After its end, a model tends to write special tokens. Without their text, the stream would seem to stall.
            body["skip_special_tokens"] = False
        return body


def normalize_url(url: str) -> str:
    """The server's root: without a trailing slash, and without `/v1` if the URL has it."""
    return url.rstrip("/").removesuffix("/v1")


def discover(url: str, api_key: str | None = None, model: str | None = None) -> Target:
    """Get a server's first model, unless one is named, and measure how its tokenizer counts words.

    Raises TargetError if the server does not answer like an OpenAI-compatible one.
    """
    base_url = normalize_url(url)
    try:
        with httpx.Client(base_url=base_url, headers=_headers(api_key), timeout=60) as client:
            if not model:
                listing = client.get("/v1/models")
                listing.raise_for_status()
                model = str(listing.json()["data"][0]["id"])
            one, many = (_prompt_tokens(client, model, words) for words in (WORDS[:1], WORDS[:1] + WORDS))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TargetError(f"{base_url}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TargetError(f"{base_url}: not the answer of an OpenAI-compatible server: {error!r}") from error
    words_per_token = len(WORDS) / max(1, many - one)
    return Target(base_url, api_key, model, words_per_token, one - 1 / words_per_token)


def _prompt_tokens(client: httpx.Client, model: str, words: list[str]) -> int:
    body = {"model": model, "prompt": " ".join(words), "max_tokens": 1}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens"])


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
