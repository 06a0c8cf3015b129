"""Names of hosts, as options and the `Host` header have them."""

from __future__ import annotations

import re
from ipaddress import ip_address

_NAME = re.compile(r"(?:\*\.)?[\w.-]+", re.ASCII)


def check_host(host: str) -> str | None:
    """What an allowed host must be; None if `host` is valid."""
    if host == "*" or _NAME.fullmatch(host) or _address(host) is not None:
        return None
    return "must be a name or an address without scheme and port, such as llm.example.com, *.example.com or ::1"


def plain_host(host: str) -> str:
    """One spelling for all of a host's: in lower case, without a dot at the end, and IPv6 as short as it gets."""
    return _address(host) or host.lower().rstrip(".")


def _address(host: str) -> str | None:
    try:
        return str(ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return None
