"""Where the server listens: a TCP port or a Unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from tidewheel.engine.errors import TidewheelError

_VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@contextlib.contextmanager
def open_listener(host: str, port: int, uds: str | None) -> Iterator[socket.socket]:
    """A bound socket that nobody is let in by yet: at the path `uds`, else at host and port.

    Raises TidewheelError if the address is taken or not this machine's. A socket's path is removed in the end.
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


def printable_address(listener: socket.socket, *, tls: bool) -> str:
    """The address for people."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(certfile: str, keyfile: str | None, ca_certs: str | None, cert_reqs: str) -> ssl.SSLContext:
    """TLS 1.2 and up with a certificate chain and its key; `cert_reqs` says whether clients must show one, too.

    That is none, optional or required. Raises TidewheelError for files that cannot be used.
    """

    def no_password() -> str:
        raise ValueError("the key is encrypted; store it without a password, readable by the server only")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except (OSError, ValueError) as error:
        files = certfile if keyfile is None else f"{certfile} and --ssl-keyfile {keyfile}"
        raise TidewheelError(f"--ssl-certfile {files} cannot be used: {_reason(error)}") from error
    context.verify_mode = _VERIFY_MODES[cert_reqs]
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise TidewheelError(f"--ssl-ca-certs {ca_certs} cannot be used: {_reason(error)}") from error
    return context


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"they are no PEM certificate and its key ({error.reason or error})"
    return str(error.strerror if isinstance(error, OSError) else error)


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
    """Removes a socket that a server which was killed left behind; anything else stays, and binding will say so."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
