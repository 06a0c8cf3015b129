"""A conversation with a server. Standard library only, as it runs anywhere."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.files.wording import reason

DEFAULT_URL = "http://127.0.0.1:8000"
_TEXTS = ("content", "reasoning_content", "reasoning")


class ChatError(TidewheelError):
    """The server could not be reached, or answered with an error."""


class UnreachableError(ChatError):
    """Nothing answers there."""


class ChatClient:
    """A conversation with an OpenAI-compatible server at `url`, with or without its `/v1`."""

    def __init__(self, url: str, *, model: str | None, system: str | None, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url!r} is not a URL such as {DEFAULT_URL}")
        self._url = url
        self._connection_type = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._address = (parts.hostname, parts.port)
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = model
        self._sampling: dict[str, Any] | None = None  # that the server wants from clients for people
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._first)
        self._images: list[dict[str, Any]] = []  # that go with the next question
        self.tokens_per_second: float | None = None
        self.parameters: dict[str, Any] = {}
        """Fields of all further requests, such as `temperature`."""

    def reset(self) -> None:
        """Forgets the conversation, but not the system message."""
        self.messages = list(self._first)
        self._images = []

    def attach(self, path: Path) -> None:
        """Sends an image with the next question. Raises ChatError if the file cannot be read."""
        try:
            data = path.expanduser().read_bytes()
        except OSError as error:
            raise ChatError(f"{path} cannot be read: {reason(error)}") from error
        kind = mimetypes.guess_type(path.name)[0] or "image/png"  # servers look at the file itself
        url = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})

    def instruct(self, system: str) -> None:
        """Begins again with another system message; an empty text means no system message."""
        self._first = [{"role": "system", "content": system}] if system else []
        self.reset()

    def serves(self, model: str) -> bool:
        """Whether the server has a model of this name, be it listed or not. Raises UnreachableError."""
        try:
            if model in self.models():
                return True
            with self._request("GET", f"/models/{quote(model, safe='')}") as response:
                return bool(_json(response.read()).get("id"))
        except UnreachableError:
            raise
        except ChatError:
            return False

    def models(self) -> dict[str, dict[str, Any]]:
        """The server's description of each model, by name. Raises ChatError."""
        with self._request("GET", "/models") as response:
            return {str(model["id"]): model for model in _json(response.read()).get("data") or []}

    def ask(self, text: str, on_reasoning: Callable[[str], object] = lambda piece: None) -> Iterator[str]:
        """The answer in pieces, to a text and the attached images. An answer that is not read to its end is forgotten,
        with its question.

        Pieces of reasoning go to `on_reasoning`. Afterwards `tokens_per_second` is the rate after the first token.
        Raises ChatError.
        """
        images, self._images = self._images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        messages = [*self.messages, {"role": "user", "content": content}]
        answer = ""
        for choice in self._stream("/chat/completions", {"messages": messages}):
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                on_reasoning(reasoning)
            if piece := delta.get("content"):
                answer += piece
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def model(self) -> str:
        """The model that is asked. Raises ChatError if the server has none."""
        if self._sampling is None:
            try:
                models = self.models()
            except ChatError:
                if self._model is None:
                    raise
                models = {}  # some servers list none
            if self._model is None and not models:
                raise ChatError(f"{self._url} serves no model")
            self._model = self._model or next(iter(models))
            sampling = models.get(self._model, {}).get("chat_sampling")
            self._sampling = sampling if isinstance(sampling, dict) else {}
        assert self._model is not None
        return self._model

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of a streamed answer, whose speed is measured."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        whole = {"model": self.model(), **(self._sampling or {}), **self.parameters, **body, **streamed}
        tokens, first, last = 0, 0.0, 0.0
        with self._request("POST", path, json.dumps(whole).encode()) as response:
            for event in _events(response):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event.get("choices", ()):
                    if choice.get("text") or any(choice.get("delta", {}).get(part) for part in _TEXTS):
                        last = time.perf_counter()
                        first = first or last
                    elif choice.get("finish_reason"):  # the last token may have no text
                        last = time.perf_counter()
                    yield choice
        self.tokens_per_second = (tokens - 1) / (last - first) if tokens > 1 and last > first > 0 else None

    def _request(self, method: str, path: str, body: bytes | None = None) -> _Response:
        connection = self._connection_type(*self._address)
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_error_message(response))
        except (OSError, HTTPException) as error:
            connection.close()
            raise UnreachableError(f"cannot talk to {self._url}: {error}; is a server running there?") from error
        except BaseException:
            connection.close()
            raise
        return _Response(connection, response)


class CompletionClient(ChatClient):
    """The same server, asked to go on with texts. Each text stands alone."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, max_tokens: int | None) -> None:
        super().__init__(url, model=model, system=None, api_key=api_key)
        self._limit = {} if max_tokens is None else {"max_tokens": max_tokens}

    def attach(self, path: Path) -> None:
        """Raises ChatError: texts have no images."""
        raise ChatError("a text has no images; use tidewheel chat")

    def ask(self, text: str, on_reasoning: Callable[[str], object] = lambda piece: None) -> Iterator[str]:
        """The continuation of the text, in pieces. Raises ChatError."""
        for choice in self._stream("/completions", {"prompt": text, **self._limit}):
            if piece := choice.get("text"):
                yield piece


class _Response:
    """A response whose connection ends with it, so that a stopped answer also stops at the server."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._connection = connection
        self._response = response

    def __enter__(self) -> HTTPResponse:
        return self._response

    def __exit__(self, *exception: object) -> None:
        self._response.close()
        self._connection.close()


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    try:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            event = _json(data)
            if "error" in event:
                raise ChatError(str(event["error"].get("message")))
            yield event
    except (OSError, HTTPException) as error:
        raise ChatError(f"the connection broke: {error}") from error
    raise ChatError("the connection ended before the answer did")


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ChatError(f"the server's answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChatError("the server's answer is not a JSON object")
    return value


def _error_message(response: HTTPResponse) -> str:
    text = response.read(65536)
    try:
        return f"the server answered {response.status}: {json.loads(text)['error']['message']}"
    except (ValueError, TypeError, KeyError):
        return f"the server answered {response.status} {response.reason}"
