"""Which network addresses are public: those that a request may make the server connect to."""

from __future__ import annotations

import ipaddress

# Written out, because what Python's `is_global` contains differs between its versions, and it counts translated
# addresses, behind which may be private ones, as global.
# https://www.iana.org/assignments/iana-ipv4-special-registry, .../iana-ipv6-special-registry
_NOT_PUBLIC_4 = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32",  # Azure's services of the host, at an address that looks public
    )
]  # fmt: skip
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = [
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # among others Teredo, which contains IPv4 addresses
        "2001:db8::/32",
        "2002::/16",  # 6to4, which contains IPv4 addresses
        "3fff::/20",
    )
]


def is_public_address(text: str) -> bool:
    """Whether an IP address is one of the public internet and not translated from IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address.scope_id is not None:
        return False
    return address in _PUBLIC_6 and not any(address in network for network in _NOT_PUBLIC_6)
