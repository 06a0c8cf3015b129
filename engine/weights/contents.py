"""The contents of a checkpoint's files, from their headers."""

from __future__ import annotations

from collections.abc import Iterable

from ..declaring.record import record


@record(frozen=True, slots=True)
class StoredFormat:
    """All tensors that a checkpoint stores in one format, under the file format's own name for it."""

    name: str
    tensors: int
    bytes: int


@record(frozen=True, slots=True)
class Contents:
    """A checkpoint: its files, the tensors in them, those that take most first, and what they say of themselves.

    `title` is the file's own name of its content, such as a GGUF file's general.file_type.
    """

    kind: str
    files: tuple[str, ...]
    formats: tuple[StoredFormat, ...]
    title: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.bytes for stored in self.formats)


def formats_in(tensors: Iterable[tuple[str, int]]) -> tuple[StoredFormat, ...]:
    """Counts tensors, each a format and its bytes."""
    found: dict[str, list[int]] = {}
    for name, num_bytes in tensors:
        found.setdefault(name, []).append(num_bytes)
    formats = [StoredFormat(name, len(sizes), sum(sizes)) for name, sizes in found.items()]
    return tuple(sorted(formats, key=lambda stored: (-stored.bytes, stored.name)))
