"""Servers, and ports for those that these tests start."""

from __future__ import annotations

from server.conftest import demo_server, start_server, unused_port

__all__ = ["demo_server", "start_server", "unused_port"]  # fixtures
