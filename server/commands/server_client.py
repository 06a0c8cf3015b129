"""Requests to a server that runs. Standard library only, as it runs anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from tidewheel.engine.errors import TidewheelError

DEFAULT_URL = "http://127.0.0.1:8000"


class ClientError(TidewheelError):
    """The server could not be reached, or answered with an error."""


class UnreachableError(ClientError):
    """Nothing answers there."""


class ServerClient:
    """Requests to a server at `url`, which may end in `/v1`. Raises ClientError if it is no URL."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url!r} is not a URL such as {DEFAULT_URL}")
        self.url = url
        self._connection_type = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._address = (parts.hostname, parts.port)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. Raises ClientError."""
        with self.request("GET", path) as response:
            return json_object(response.read())

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that a body is answered with. Raises ClientError."""
        with self.request("POST", path, body) as response:
            return json_object(response.read())

    def lines(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of an answer, one a line. Raises ClientError, also for an error in a line."""
        with self.request("POST", path, body) as response:
            try:
                for line in response:
                    answer = json_object(line)
                    if "error" in answer:
                        raise ClientError(str(answer["error"]))
                    yield answer
            except (OSError, HTTPException) as error:
                raise ClientError(f"the connection broke: {error}") from error

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> OpenResponse:
        """The response, within which its body is read. Raises ClientError unless its status is 200."""
        connection = self._connection_type(*self._address)
        try:
            connection.request(
                method, self._base + path, None if body is None else json.dumps(body).encode(), self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                raise ClientError(_error_message(response))
        except (OSError, HTTPException) as error:
            connection.close()
            raise UnreachableError(f"cannot talk to {self.url}: {error}; is a server running there?") from error
        except BaseException:
            connection.close()
            raise
        return OpenResponse(connection, response)


class OpenResponse:
    """A response whose connection ends with it, so that a stopped answer also stops at the server."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._connection = connection
        self._response = response

    def __enter__(self) -> HTTPResponse:
        return self._response

    def __exit__(self, *exception: object) -> None:
        self._response.close()
        self._connection.close()


def json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ClientError(f"the server's answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ClientError("the server's answer is not a JSON object")
    return value


def _error_message(response: HTTPResponse) -> str:
    text = response.read(65536)
    try:
        error = json.loads(text)["error"]
        return f"the server answered {response.status}: {error if isinstance(error, str) else error['message']}"
    except (ValueError, TypeError, KeyError):
        return f"the server answered {response.status} {response.reason}"
