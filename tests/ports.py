"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def lasting_port() -> int:
    """A port that nothing listens on now, and that the system gives to no other process while its listener is away."""
    while True:
        port = random.randrange(20_000, 30_000)  # below the ports of outgoing connections
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)) != 0:
                return port
