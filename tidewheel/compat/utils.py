"""What scripts for vLLM take from `vllm.utils` and is nowhere else."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """A random name for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex
