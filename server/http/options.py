"""The options of the HTTP server: where it listens, TLS, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from tidewheel.engine.declaring.option import Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.declaring.values import at_least, between, number, whole_number

from .limits import ConnectionLimits

# Python's numbers for them.
_CERTIFICATE_REQUIREMENTS = {"0": "none", "1": "optional", "2": "required"}


@record(frozen=True, kw_only=True)
class HttpOptions(Options):
    """Where to listen, with which certificates, and how much clients may send. Times are in seconds."""

    host: str = option("127.0.0.1", "the address to listen on; 0.0.0.0 is every one")
    port: int = option(
        8000, "the port to listen on; 0 lets the system choose", parse=whole_number, check=between(0, 65535)
    )
    uds: str | None = option(None, "a Unix socket to listen on instead of host and port", metavar="PATH")
    ssl_certfile: str | None = option(None, "serve TLS with this certificate chain (PEM)", metavar="FILE")
    ssl_keyfile: str | None = option(
        None, "the certificate's key (PEM, without a password) [in the certificate's file]", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(None, "CA certificates that verify those of clients (PEM)", metavar="FILE")
    ssl_cert_reqs: str = option(
        "none",
        "whether clients must show a certificate",
        parse=lambda text: _CERTIFICATE_REQUIREMENTS.get(text, text),
        choices=tuple(_CERTIFICATE_REQUIREMENTS.values()),
    )
    enable_ssl_refresh: bool = option(False, "reload the certificate files when they change")
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    keep_alive_timeout_s: int = option(
        75,  # longer than clients keep idle connections, or they would send into closed ones
        "how long an idle connection stays open",
        flag="--timeout-keep-alive",
        parse=whole_number,
        check=at_least(1),
        metavar="SECONDS",
        env_aliases=("VLLM_HTTP_TIMEOUT_KEEP_ALIVE",),
    )
    shutdown_timeout: float = option(
        30.0,
        "how long running answers may go on after SIGTERM",
        parse=number,
        check=at_least(0),
        metavar="SECONDS",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.ssl_certfile is None:
            needing = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh")
            yield from self._needing(needing, "--ssl-certfile")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == "none"):
            yield "clients are checked with both --ssl-ca-certs FILE and --ssl-cert-reqs optional or required"
