"""Quoting a file's content in errors: always short, and in one line. Sizes for people."""

from __future__ import annotations

_VALUE_CHARACTERS = 100
_MESSAGE_CHARACTERS = 300
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def shown(value: object) -> str:
    """A value from a file, as Python writes it."""
    text = repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else text[:_VALUE_CHARACTERS] + "..."


def reason(error: Exception) -> str:
    """Why a file or folder cannot be used, for a sentence that names it: no number of the error, no path."""
    return getattr(error, "strerror", None) or one_line(error)


def one_line(error: object) -> str:
    """A library's error message, which may quote the file."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "..."


def in_bytes(count: int) -> str:
    """Bytes in the largest unit that fits, as in 1.50 GiB."""
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    if power > 0:
        return f"{count / (1 << 10 * power):.2f} {_UNITS[power - 1]}"
    return f"{count} byte{'s' * (count != 1)}"
