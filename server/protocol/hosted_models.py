"""What a server of several models tells of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tidewheel import __version__

from .models import ModelCard

StateName = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class ModelStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model's state; of one that is loading, how much of that is done, 0 to 1. `error` is why it cannot be loaded."""

    value: StateName
    progress: float | None = None
    error: str | None = None


class HostedModelCard(ModelCard, kw_only=True):
    """A ModelCard with the model's state.

    The `size` in bytes is what it takes in memory, or that of its files as long as it was never loaded. `size` and
    `max_model_len` are null as long as they are not known.
    """

    max_model_len: int | None = None  # type: ignore[assignment]  # a card is only read
    size: int | None
    status: ModelStatus


class HostedModelList(msgspec.Struct, kw_only=True):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[HostedModelCard]


class HostHealth(msgspec.Struct, kw_only=True):
    """A server that serves, and the models that are ready: what others are asked, they answer when they are loaded."""

    status: str = "ok"
    ready: list[str]


class HostInfo(msgspec.Struct, kw_only=True):
    """The models that there are, by their state, and the options that the server was started with, without secrets.

    `memory_bytes` is what models may take together, and `memory_used_bytes` what the loaded ones do; of `memory_bytes`
    null means that the system does not say. `options` are for keys that may administer; others get none.
    """

    version: str = __version__
    models: Mapping[str, StateName]
    memory_bytes: int | None
    memory_used_bytes: int
    options: Mapping[str, Any]
