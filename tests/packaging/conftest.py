"""Ports for the servers that these tests start."""

from __future__ import annotations

from server.conftest import unused_port

__all__ = ["unused_port"]  # a fixture
