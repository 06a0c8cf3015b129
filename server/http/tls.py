"""TLS, with certificates of the server and of clients."""

from __future__ import annotations

import ssl

from tidewheel.engine.errors import TidewheelError

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


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"they are no PEM certificate and its key ({error.reason or error})"
    return str(error.strerror if isinstance(error, OSError) else error)
