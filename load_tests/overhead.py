"""Measures what HTTP costs: the same streams run through the engine alone and through a server, in turn.

The client is as light as Python allows, so that it leaves the processors to a server on the same machine. It polls raw
connections every 10 ms, or less often if there are many, and counts the frames.

    python load_tests/overhead.py ./my-model --streams 32 -- --quantization int8
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import uvloop

import tidewheel
from tidewheel.engine.loading.load import load_engine
from tidewheel.server.commands.bench.engine_runs import Arrivals, common_rate, generate
from tidewheel.server.options.serve import parse_options

# The file and not `-m tidewheel`, which would look for the package in the current folder first.
_PROGRAM = str(Path(tidewheel.__file__).with_name("__main__.py"))
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0
_OFFLINE = "--offline-worker"
_DONE = b"data: [DONE]"
_NAP_S = 0.01  # at least
_NAP_PER_STREAM_S = 0.0003  # polling a stream costs the same for one frame as for ten
_RECEIVED_BYTES = 2**16
_FIRST_TOKEN_ID = 256  # of the prompts: above the special tokens that most vocabularies begin with
_LAST_TOKEN_ID = 2047


class OverheadError(Exception):
    """A server or an engine that could not be measured."""


class Stream:
    """One streamed completion over its own connection: counts frames as they arrive, without parsing them."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.socket = socket.create_connection((_HOST, port))
        self.arrivals: Arrivals = []
        payload = json.dumps(body).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: %s:%d\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (_HOST.encode(), port, len(payload), payload)
        )
        self._tail = bytearray()

    def ask(self) -> None:
        """Send the request."""
        self.socket.sendall(self._request)

    def receive(self, buffer: bytearray, now: float) -> bool:
        """Count the frames that have arrived, by means of `buffer`; False at the end.

        Frames are small and begin a write each, so none is split in a way that would be counted twice.
        """
        size = self.socket.recv_into(buffer)
        if frames := buffer.count(b"data: {", 0, size):
            self.arrivals.append((now, frames))
        if size:
            data = buffer[max(size - 2048, 0) : size]
            self._tail = data if size > 256 else (self._tail + data)[-2048:]
        elif _DONE not in self._tail or b'"error"' in self._tail:
            raise OverheadError(f"a stream broke off: {self._tail.decode(errors='replace').strip()}")
        return size > 0


def http_rate(port: int, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens a second of one streamed completion for each prompt, while all of them decode."""
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        streams = []
        for prompt in prompts:
            body = {
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,  # all that some answers have, and every token is to have a frame
                "stream": True,
            }
            stream = Stream(port, body)
            streams.append(stream)
            opened.enter_context(stream.socket)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        # The connections are opened before, so that all streams begin together.
        for stream in streams:
            stream.ask()
        buffer = bytearray(_RECEIVED_BYTES)
        while selector.get_map():
            ready, now = selector.select(), time.perf_counter()
            for key, _ in ready:
                if not key.data.receive(buffer, now):
                    selector.unregister(key.fileobj)
            # Several frames at a time, as from a remote server: waking this process for each would cost the server's
            # processor more than the frame itself.
            time.sleep(max(_NAP_S, _NAP_PER_STREAM_S * len(prompts)))
    # A token whose text is not certain yet has no frame, so frames are scaled to the requested tokens.
    frames = sum(count for stream in streams for _, count in stream.arrivals)
    return _rate([stream.arrivals for stream in streams]) * num_tokens * len(prompts) / frames


def _rate(sequences: list[Arrivals]) -> float:
    rate = common_rate(sequences)
    if rate is None:
        raise OverheadError("there was no time when all streams decoded; raise --tokens")
    return rate


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[int]:
    """A server's port, once it answers `/health`."""
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, _PROGRAM, "serve", *arguments, "--host", _HOST, "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "error", "--disable-access-log"])
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise OverheadError("the server did not start")
            time.sleep(0.01)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        with socket.create_connection((_HOST, port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return re.match(rb"HTTP/1\.\d 200", connection.recv(64)) is not None
    except OSError:
        return False


@contextmanager
def offline_engine(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """An engine in a separate process, which answers each line of prompts with a rate."""
    command = [sys.executable, __file__, _OFFLINE, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def offline_rate(process: subprocess.Popen[str], prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens a second through the engine, without a server, while all of the prompts decode."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([prompts, num_tokens]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise OverheadError("the engine without a server did not answer")
    return float(answer)


def serve_offline(arguments: Sequence[str]) -> int:
    """The other end of `offline_engine`."""
    loop = uvloop.new_event_loop()
    engine = load_engine(parse_options(arguments).engine)
    engine.start(loop)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        arrivals = loop.run_until_complete(generate(engine, prompts, num_tokens))
        if any(sum(count for _, count in sequence) < num_tokens for sequence in arrivals):
            sys.stderr.write("overhead: the model's context is too small for prompts and answers of this length\n")
            break
        print(_rate(arrivals), flush=True)
    loop.run_until_complete(engine.stop())
    return 0


def measure(
    serve_arguments: Sequence[str], streams: int, prompt_tokens: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Rates of all rounds, one of each kind in turn, after one warm-up of each."""
    random = Random(0)
    http: list[float] = []
    offline: list[float] = []
    with ExitStack() as running:
        port = running.enter_context(server(serve_arguments))
        engine = running.enter_context(offline_engine(serve_arguments))
        for round_number in range(rounds + 1):
            prompts = [
                [random.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(prompt_tokens)] for _ in range(streams)
            ]
            offline.append(offline_rate(engine, prompts, tokens))
            http.append(http_rate(port, prompts, tokens))
            if round_number == 0:
                offline.clear()
                http.clear()
    ratios = [through / alone for through, alone in zip(http, offline, strict=True)]
    added = [streams / through - streams / alone for through, alone in zip(http, offline, strict=True)]
    return {
        "streams": streams,
        "offline_tokens_per_second": _spread(offline),
        "http_tokens_per_second": _spread(http),
        "ratio": _spread(ratios),
        "added_ms_per_token": _spread([seconds * 1e3 for seconds in added]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def report(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{result['streams']} streams, medians of all rounds (least..most)"]
    for name, label in (
        ("offline_tokens_per_second", "engine alone, tokens/s"),
        ("http_tokens_per_second", "through HTTP, tokens/s"),
        ("ratio", "ratio, round by round"),
        ("added_ms_per_token", "added to a token, ms"),
    ):
        figures = result[name]
        lines.append(f"{label:24} {figures['median']:>10g}  ({figures['min']:g}..{figures['max']:g})")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what follows `--` goes to `tidewheel serve`."""
    parser = argparse.ArgumentParser(
        description="What HTTP costs: the same streams with and without a server.",
        usage="%(prog)s [options] [model] [-- options of `tidewheel serve`]",
    )
    parser.add_argument("model", nargs="?", help="a folder or hub id [the embedded model]")
    parser.add_argument("--streams", type=int, default=32, help="streams at once [32]")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a prompt [32]")
    parser.add_argument("--tokens", type=int, default=224, help="tokens of an answer [224]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count [5]")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    args.serve_arguments = ([args.model] if args.model else []) + given[end + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where nothing could be measured."""
    args = parse_args(argv)
    try:
        result = measure(args.serve_arguments, args.streams, args.prompt_tokens, args.tokens, args.rounds)
    except OverheadError as error:
        sys.stderr.write(f"overhead: {error}\n")
        return 1
    sys.stdout.write(report(result) + "\n")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(serve_offline(sys.argv[2:]) if sys.argv[1:2] == [_OFFLINE] else main())
