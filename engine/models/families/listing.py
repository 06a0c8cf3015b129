"""What the documentation says of an architecture: a family's `ARCHITECTURES` has a Listing for each."""

from __future__ import annotations

from typing import NamedTuple


class Listing(NamedTuple):
    """The `models` that people know an architecture by, and what of its config is `refused`, in Markdown.

    `docs/models.md` is made of them.
    """

    models: str
    refused: str = ""
