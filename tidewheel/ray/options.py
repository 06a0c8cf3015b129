"""The options of `tidewheel serve`, as replicas take them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.engine.declaring.option import listed
from tidewheel.engine.errors import TidewheelError
from tidewheel.server.options.config_file import as_command_line
from tidewheel.server.options.serve import ServeOptions, parse_options

_SWITCHES = {"true": True, "false": False}
_OF_CONNECTIONS = "max_header_bytes max_header_count read_timeout_s write_timeout_s".split()


def command_line(options: Mapping[str, Any]) -> list[str]:
    """An application's arguments as those of `tidewheel serve`; `serve run` has made texts of them."""
    return as_command_line({name: _SWITCHES.get(str(value).lower(), value) for name, value in options.items()})


def parse_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> ServeOptions:
    """Like `parse_options`, but raises TidewheelError instead of ending the process."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_options(arguments, environment, prog="tidewheel.ray:app")
    except SystemExit:
        raise TidewheelError(said.getvalue().strip() or "the options cannot be used") from None


def check_connections(options: ServeOptions) -> None:
    """Raises TidewheelError for options of connections, which are not the replicas' but of the proxies of Serve."""
    http = options.http
    flags = http.differing_flags(("uds", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh"))
    if flags := [*flags, *http.limits.differing_flags(_OF_CONNECTIONS)]:
        have = "has" if len(flags) == 1 else "have"
        raise TidewheelError(
            f"{listed(flags)} {have} no effect on Ray Serve, whose proxies hold the connections: drop them, or put a "
            "proxy such as HAProxy before Serve's (docs/scale-out.md)"
        )


def check_addresses(options: ServeOptions) -> None:
    """Raises TidewheelError for an address or certificate, where Serve has been started with its own."""
    flags = options.http.differing_flags(("host", "port", "ssl_certfile", "ssl_keyfile", "keep_alive_timeout_s"))
    if flags:
        are = "is" if len(flags) == 1 else "are"
        raise TidewheelError(
            f"{listed(flags)} {are} not the application's: say it to Serve, in http_options of the config file"
        )
