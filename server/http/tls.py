"""TLS, with certificates of the server and of clients."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence

from tidewheel.engine.errors import TidewheelError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def tls_context(certfile: str, keyfile: str | None, ca_certs: str | None, cert_reqs: str) -> ssl.SSLContext:
    """TLS 1.2 and later, with a certificate chain and its key.

    `cert_reqs` is none, optional or required: whether clients must show a certificate. Raises TidewheelError for files
    that cannot be used.
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


class RefreshedTls:
    """A TLS context that `make` makes anew when one of its `files` has changed. Running connections keep the old one.

    Calling it gives the context for a new connection. Files that cannot be used, such as a certificate whose key is not
    written yet, are logged, and the last context stays until they change again.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Sequence[str]) -> None:
        """Raises what `make` raises."""
        self._make, self._files = make, files
        self._seen, self._context = self._look(), make()
        self._next_look = time.monotonic() + _LOOK_EVERY_S

    def __call__(self) -> ssl.SSLContext:
        if time.monotonic() >= self._next_look:
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                self._refresh()
            self._next_look = time.monotonic() + _LOOK_EVERY_S
        return self._context

    def _refresh(self) -> None:
        try:
            self._context = self._make()
        except TidewheelError as error:
            logger.warning("The previous certificate stays in use: %s", error)
        else:
            logger.info("The certificate has changed and is in use: %s", self._files[0])

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_version_of(file) for file in self._files]


def _version_of(file: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)  # of what a symbolic link leads to, which is how Kubernetes changes secrets
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"they are not a PEM certificate and its key ({error.reason or error})"
    return str(error.strerror if isinstance(error, OSError) else error)
