"""`/v1/models`: the names that are served."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name. `root` is the model behind it, `max_model_len` the context in tokens.

    An adapter has a `parent`. `chat_sampling` are fields for the requests of clients that people write to, where these
    say nothing else: the model suggests no sampling.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tidewheel"
    root: str
    parent: str | None = None
    max_model_len: int
    chat_sampling: dict[str, float | int] | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
