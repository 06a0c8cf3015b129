"""What scripts for vLLM take from `vllm.utils`."""

from __future__ import annotations

import uuid

from .argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """A random name for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex
