"""`tidewheel chat`: talk to a running server from the terminal. Standard library only, as it runs anywhere."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TextIO
from urllib.parse import urlsplit

from tidewheel.engine.errors import TidewheelError

DEFAULT_URL = "http://127.0.0.1:8000"

_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"


class ChatError(TidewheelError):
    """The server could not be reached, or answered with an error."""


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
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._first)

    def reset(self) -> None:
        """Forgets the conversation, but not the system message."""
        self.messages = list(self._first)

    def first_model(self) -> str:
        """The first model that the server lists. Raises ChatError."""
        with self._request("GET", "/models") as response:
            models = _json(response.read()).get("data") or []
        if not models:
            raise ChatError(f"{self._url} serves no model")
        return str(models[0]["id"])

    def ask(self, text: str) -> Iterator[str]:
        """The answer in pieces. An answer that is not read to its end is forgotten, with its question.

        Raises ChatError.
        """
        if self._model is None:
            self._model = self.first_model()
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        with self._request("POST", "/chat/completions", self._body(messages)) as response:
            for piece in _pieces(response):
                answer += piece
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _body(self, messages: list[dict[str, str]]) -> bytes:
        return json.dumps({"model": self._model, "messages": messages, "stream": True}).encode()

    def _request(self, method: str, path: str, body: bytes | None = None) -> _Response:
        connection = self._connection_type(*self._address)
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_error_message(response))
        except (OSError, HTTPException) as error:
            connection.close()
            raise ChatError(f"cannot talk to {self._url}: {error}; is a server running there?") from error
        except BaseException:
            connection.close()
            raise
        return _Response(connection, response)


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


def _pieces(response: HTTPResponse) -> Iterator[str]:
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
            for choice in event.get("choices", ()):
                if content := choice["delta"].get("content"):
                    yield content
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


def _say(client: ChatClient, text: str, out: TextIO) -> None:
    for piece in client.ask(text):
        print(piece, end="", file=out, flush=True)
    print(file=out, flush=True)


def _converse(client: ChatClient, source: TextIO, out: TextIO) -> None:
    """Lines from `source` as questions, until it ends or says /exit. Prompts are shown to a terminal only."""
    terminal = source.isatty()
    if terminal:
        import readline  # noqa: F401 - gives input() line editing and a history

        print(_HELP, file=out)
    while True:
        try:
            line = input("> ") if terminal else source.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=out)
            return
        if not line and not terminal:
            return
        line = line.strip()
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            client.reset()
        elif line == "/help":
            print(_HELP, file=out)
        elif line:
            try:
                _say(client, line, out)
            except KeyboardInterrupt:
                print("\n(stopped)", file=out)
            except ChatError as error:
                if not terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """The `chat` command. Raises ChatError."""
    parser = argparse.ArgumentParser(
        prog="tidewheel chat", description="Talk to a running server.", epilog=f"In the conversation: {_HELP}."
    )
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="ask this and leave; else a conversation")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server [{DEFAULT_URL}]")
    parser.add_argument("--model", help="the model's name [the server's first]")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument(
        "--api-key", default=os.environ.get("TIDEWHEEL_API_KEY", "").partition(" ")[0], help="[$TIDEWHEEL_API_KEY]"
    )
    options = parser.parse_args(list(arguments))
    client = ChatClient(options.url, model=options.model, system=options.system, api_key=options.api_key)
    if options.message:
        _say(client, " ".join(options.message), sys.stdout)
    else:
        _converse(client, sys.stdin, sys.stdout)
    return 0
