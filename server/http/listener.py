"""Where the server listens: a TCP port or a Unix socket."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator

from tidewheel.engine.errors import TidewheelError

_MAX_OPEN_FILES = 65536 if sys.platform != "darwin" else 10240  # macOS refuses more, even if its hard limit is higher


@contextlib.contextmanager
def open_listener(host: str, port: int, uds: str | None) -> Iterator[socket.socket]:
    """A bound socket that does not accept connections yet: at the path `uds` if given, else at host and port.

    Raises TidewheelError if the address is taken or not this machine's. The path is removed when the server ends.
    """
    if uds is None:
        with _bind(host, port) as listener:
            yield listener
        return
    with _bind_unix(uds) as listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(uds)


def allow_many_connections() -> None:
    """Raise the limit on open files as far as this process may. It is often 1,024, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def printable_address(listener: socket.socket, *, tls: bool) -> str:
    """The address as people write it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TidewheelError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise TidewheelError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket that a killed server has left behind. Anything else stays, and `bind` will then fail."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
