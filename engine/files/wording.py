"""What an error shows of a file's content: short, and in one line, whatever the file holds."""

from __future__ import annotations

_VALUE_CHARACTERS = 100
_MESSAGE_CHARACTERS = 300


def shown(value: object) -> str:
    """A value out of a file, as Python writes it."""
    text = repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else text[:_VALUE_CHARACTERS] + "..."


def one_line(error: object) -> str:
    """What a library says, which may quote the file."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "..."
