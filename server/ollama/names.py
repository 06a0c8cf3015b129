"""Names of models as Ollama has them: each with a tag, which is `latest` where none is given."""

from __future__ import annotations

from collections.abc import Collection

_LATEST = ":latest"


def tagged(name: str) -> str:
    """A served name with a tag."""
    return name if ":" in name else name + _LATEST


def untagged(name: str | None, served: Collection[str]) -> str | None:
    """The served name that a request means. A name that is not served is returned as it is, or without its tag."""
    if name is None or name in served:
        return name
    return name.removesuffix(_LATEST)
