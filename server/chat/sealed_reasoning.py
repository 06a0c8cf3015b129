"""Reasoning as an opaque text that clients carry from turn to turn, where a protocol has a field for one."""

from __future__ import annotations

import base64

from ..errors import bad_request


def seal_reasoning(text: str) -> str:
    """The opaque text. It is no secret: this server shows reasoning to all who ask for it."""
    return base64.b64encode(text.encode()).decode()


def unseal_reasoning(sealed: str, param: str) -> str:
    """What was sealed. Raises ApiError (400) naming `param` for a text that another server made."""
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except ValueError:
        raise bad_request(f"{param} was not written by this server; leave it out", param) from None
