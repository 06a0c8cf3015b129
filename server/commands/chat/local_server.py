"""A server for one conversation, when none is running: it ends with the conversation."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import FrameType

from ...own_command import own_command
from ..server_client import ClientError

_POLL_S = 0.05
_END_S = 10.0
_SAYS = "tidewheel serve: "


def download(model: str) -> None:
    """Downloads a model of the hub, with bars on this terminal. Raises ClientError if that fails, when the reason is on
    the terminal already.
    """
    if subprocess.run(own_command("pull", model), stdout=subprocess.DEVNULL).returncode:
        raise ClientError(f"{model} could not be downloaded")


@contextlib.contextmanager
def local_server(model: str | None) -> Iterator[str]:
    """Serves a model, the built-in one for None, on a free port of this machine. Yields the address.

    Raises ClientError with the server's last words if it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = own_command("serve", *([model] if model else []), "--host", "127.0.0.1", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log, _end_on_hangup():
        # In a session of its own, as Ctrl-C is to stop an answer and not the server.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            while not _answers(url):
                if process.poll() is not None:
                    log.seek(0)
                    raise ClientError(f"the server did not start: {_last_words(log.read())}")
                time.sleep(_POLL_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_words(log: str) -> str:
    """The last message of a server that did not start: a line, or several lines that begin with its name."""
    lines = log.strip().splitlines() or ["it wrote nothing"]
    begin = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_SAYS)), len(lines) - 1)
    return "\n".join(lines[begin:]).removeprefix(_SAYS)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def _end_on_hangup() -> Iterator[None]:
    """Has a closed terminal or a SIGTERM end this process in order, so that the server ends too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
