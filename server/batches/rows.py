"""A batch file's lines: requests in, answers out, in OpenAI's format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from tidewheel.engine.errors import TidewheelError, quoted

from ..errors import ApiError, bad_request
from ..http.json_limits import LONGEST_NAME, JsonCounts
from ..ids import new_id
from ..protocol.decode import unsupported
from ..rests import Rests

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"),
    "/v1/pooling",
    *("/score", "/rerank", "/v2/rerank", "/classify", "/pooling"),  # the same, by the names that clients know
)
MAX_LINE_BYTES = 256 * 2**20  # of a request, or of an answer
_MAX_ID = 512  # characters
_PIECE = 2**16  # bytes of a request that are looked at together


class BatchRow(msgspec.Struct):
    """A request of a batch. `body` is JSON that only the endpoint reads."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"

    def check(self, url: str | None = None) -> None:
        """Raises ApiError (400) for a request that no batch can have, or one that is not for the batch's `url`."""
        if self.method != "POST":
            raise bad_request(f"method must be POST, got {quoted(self.method)}", "method")
        if self.url not in URLS or (url is not None and self.url != url):
            raise bad_request(f"url must be {url or ' or '.join(URLS)}, got {quoted(self.url)}", "url")
        try:
            asked = msgspec.json.decode(self.body, type=_Streams)
        except (msgspec.DecodeError, RecursionError):
            return  # the endpoint has a better message
        if asked.stream:
            raise unsupported("stream", " in a batch: leave it out")


class _Streams(msgspec.Struct):
    stream: object = None


class BatchResponse(msgspec.Struct):
    """An endpoint's answer: its HTTP status, and its body."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a request failed."""

    message: str
    code: str | None = None
    param: str | None = None


class BatchAnswer(msgspec.Struct):
    """A line of a batch's output."""

    id: str
    custom_id: str
    response: BatchResponse
    error: BatchError | None = None


class _Failed(msgspec.Struct):
    error: BatchError


class _Done(msgspec.Struct):
    custom_id: str
    error: object = None


_row_decoder = msgspec.json.Decoder(BatchRow)


def answer_line(custom_id: str, status: int, body: bytes) -> bytes:
    """An endpoint's answer as a line of the output."""
    request_id = new_id()
    answer = BatchAnswer(f"batch_req_{request_id}", custom_id, BatchResponse(status, request_id, msgspec.Raw(body)))
    if status != HTTPStatus.OK:
        answer.error = error_of(body)
    return msgspec.json.encode(answer) + b"\n"


def error_of(body: bytes) -> BatchError:
    """What an endpoint's answer that is an error says."""
    return msgspec.json.decode(body, type=_Failed).error


def error_line(custom_id: str, error: ApiError) -> bytes:
    """An error as a line of the output."""
    return answer_line(custom_id, error.status, error.body())


def read_rows(path: Path) -> Iterator[BatchRow]:
    """The requests of a file, one after the other; empty lines are passed over. Raises TidewheelError for others."""
    with path.open("rb") as file:
        yield from rows_in(file)


def rows_in(file: BinaryIO) -> Iterator[BatchRow]:
    """As `read_rows`, of a file that is open or in memory."""
    for number, line in _lines(file):
        if not line.strip():
            continue
        try:
            row = _row_decoder.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise TidewheelError(f"line {number} is not a batch request: {error}") from None
        if not 0 < len(row.custom_id) <= _MAX_ID:
            raise TidewheelError(f"line {number}: custom_id must have 1 to {_MAX_ID} characters")
        yield row


def check_file(
    path: Path, most: int | None = None, max_values: int | None = None, *, rests: Rests | None = None
) -> int:
    """How many requests a file has, `most` at most. Raises TidewheelError, saying where, for one that is no batch.

    With `max_values`, a request's JSON has the limits of a request's body: see `JsonCounts`. With `rests`, this thread
    has them between requests.
    """
    seen: set[str] = set()
    for row in read_rows(path):
        if rests is not None:
            rests.if_due()
        if row.custom_id in seen:
            raise TidewheelError(f"the custom_id {quoted(row.custom_id)} occurs twice: each request needs its own")
        seen.add(row.custom_id)
        if most is not None and len(seen) > most:
            raise TidewheelError(f"a batch may have at most {most} requests")
        if max_values is not None and (limit := _excess(row.body, max_values)):
            raise TidewheelError(f"the request {quoted(row.custom_id)}: its JSON must have at most {limit}")
    if not seen:
        raise TidewheelError("it contains no requests")
    return len(seen)


def _excess(body: msgspec.Raw, max_values: int) -> str | None:
    if len(body) <= min(LONGEST_NAME, max_values):
        return None  # as nearly all are: nothing in it can be more than its bytes
    counts = JsonCounts()
    for start in range(0, len(body), _PIECE):
        counts.add(bytes(memoryview(body)[start : start + _PIECE]))
        if limit := counts.excess(max_values):
            return limit
    return None


def finished_rows(path: Path) -> Mapping[str, bool]:
    """The `custom_id`s of an output that was begun, and whether each has failed.

    A last line that was not written to its end is cut off.
    """
    done: dict[str, bool] = {}
    if not path.exists():
        return done
    whole = 0
    with path.open("rb") as file:
        for number, line in _lines(file):
            if not line.endswith(b"\n"):
                break
            try:
                row = msgspec.json.decode(line, type=_Done)
            except msgspec.DecodeError as error:
                raise TidewheelError(f"line {number} of {path} is not a batch's answer: {error}") from None
            done[row.custom_id] = row.error is not None
            whole += len(line)
    if whole < path.stat().st_size:
        with path.open("r+b") as output:
            output.truncate(whole)
    return done


def add_line(output: FileIO, line: bytes) -> None:
    """Append a line to an open output. If it raises OSError, no part of the line is left there."""
    end = output.seek(0, os.SEEK_END)
    left = memoryview(line)
    try:
        while left:
            left = left[output.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            output.truncate(end)  # another line, which may be shorter, would be written behind the part
        raise


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, of bounded length."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TidewheelError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        yield number, line
