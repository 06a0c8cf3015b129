"""Lora: an adapter as requests and sequences name it."""

from __future__ import annotations

from msgspec import Struct


class Lora(Struct, frozen=True):
    """An adapter that is in the executor's memory, under its `number` there. Equal digests compute the same.

    Its context is `rope_factor` times as long as the model's own.
    """

    number: int
    digest: str
    rope_factor: float = 1.0
