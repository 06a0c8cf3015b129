"""A conversation with a server. Standard library only, as it runs anywhere."""

from __future__ import annotations

import base64
import mimetypes
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tidewheel.engine.files.wording import reason

from ..server_client import ClientError, ServerClient, UnreachableError, json_object

_FEWEST_TOKENS = 8  # after the first one: fewer may come at once, and tell no rate
_TEXTS = ("content", "reasoning_content", "reasoning")


class ChatClient(ServerClient):
    """A conversation with an OpenAI-compatible server at `url`, with or without its `/v1`."""

    def __init__(self, url: str, *, model: str | None, system: str | None, api_key: str | None) -> None:
        super().__init__(url, api_key=api_key)
        self._model = model
        self._sampling: dict[str, Any] | None = None  # that the server wants from clients for people
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._first)
        self._images: list[dict[str, Any]] = []  # that go with the next question
        self.tokens_per_second: float | None = None
        self.parameters: dict[str, Any] = {}
        """Fields of all further requests, such as `temperature`."""
        self.on_wait: Callable[[str], object] = lambda text: None
        """Is told what the server says before an answer begins, such as how far the model is loaded."""

    def reset(self) -> None:
        """Forgets the conversation, but not the system message."""
        self.messages = list(self._first)
        self._images = []

    def attach(self, path: Path) -> None:
        """Sends an image with the next question. Raises ClientError if the file cannot be read."""
        try:
            data = path.expanduser().read_bytes()
        except OSError as error:
            raise ClientError(f"{path} cannot be read: {reason(error)}") from error
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
            return bool(self.get(f"/v1/models/{quote(model, safe='')}").get("id"))
        except UnreachableError:
            raise
        except ClientError:
            return False

    def models(self) -> dict[str, dict[str, Any]]:
        """The server's description of each model, by name. Raises ClientError."""
        return {str(model["id"]): model for model in self.get("/v1/models").get("data") or []}

    def ask(self, text: str, on_reasoning: Callable[[str], object] = lambda piece: None) -> Iterator[str]:
        """The answer in pieces, to a text and the attached images. An answer that is not read to its end is forgotten,
        with its question.

        Pieces of reasoning go to `on_reasoning`. Afterwards `tokens_per_second` is the rate after the first token,
        or None for a short answer.
        Raises ClientError.
        """
        images, self._images = self._images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        messages = [*self.messages, {"role": "user", "content": content}]
        answer = ""
        for choice in self._stream("/v1/chat/completions", {"messages": messages}):
            delta = choice["delta"]
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                on_reasoning(reasoning)
            if piece := delta.get("content"):
                answer += piece
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def model(self) -> str:
        """The model that is asked. Raises ClientError if the server has none."""
        if self._sampling is None:
            try:
                models = self.models()
            except ClientError:
                if self._model is None:
                    raise
                models = {}  # some servers list none
            if self._model is None and not models:
                raise ClientError(f"{self.url} serves no model")
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
        with self.request("POST", path, whole) as response:
            for event in _events(response, self.on_wait):
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                for choice in event.get("choices", ()):
                    if choice.get("text") or any(choice.get("delta", {}).get(part) for part in _TEXTS):
                        last = time.perf_counter()
                        first = first or last
                    elif choice.get("finish_reason"):  # the last token may have no text
                        last = time.perf_counter()
                    yield choice
        is_rate = tokens > _FEWEST_TOKENS and last > first > 0
        self.tokens_per_second = (tokens - 1) / (last - first) if is_rate else None


class CompletionClient(ChatClient):
    """The same server, asked to go on with texts. Each text stands alone."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, max_tokens: int | None) -> None:
        super().__init__(url, model=model, system=None, api_key=api_key)
        self._limit = {} if max_tokens is None else {"max_tokens": max_tokens}

    def attach(self, path: Path) -> None:
        """Raises ClientError: texts have no images."""
        raise ClientError("a text has no images; use tidewheel chat")

    def ask(self, text: str, on_reasoning: Callable[[str], object] = lambda piece: None) -> Iterator[str]:
        """The continuation of the text, in pieces. Raises ClientError."""
        for choice in self._stream("/v1/completions", {"prompt": text, **self._limit}):
            if piece := choice.get("text"):
                yield piece


def _events(response: HTTPResponse, on_wait: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    try:
        for line in response:
            if line.startswith(b":"):
                on_wait(line[1:].decode(errors="replace").strip())
            if not line.startswith(b"data: "):
                continue
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            event = json_object(data)
            if "error" in event:
                raise ClientError(str(event["error"].get("message")))
            yield event
    except (OSError, HTTPException) as error:
        raise ClientError(f"the connection broke: {error}") from error
    raise ClientError("the connection ended before the answer did")
