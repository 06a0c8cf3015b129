"""Catches the process of a lent tokenizer."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Lent = TypeVar("Lent")


def lend(make: Callable[[], Lent]) -> tuple[Lent, subprocess.Popen[bytes]]:
    """A tokenizer that `make` lends, and its process."""
    started: list[subprocess.Popen[bytes]] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Process)
        return make(), started[0]
