"""The endpoints of llama.cpp's router for several models: the requests, and what is told of each model."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .decode import Body
from .models import ModelCard


class ModelRequest(Body, kw_only=True):
    """A body of `/models` and `/models/load`, with the model's name."""

    model: str


class UnloadRequest(ModelRequest, kw_only=True):
    """A body of `/models/unload`. With `wait`, requests that run are waited for; else they refuse it."""

    wait: bool | None = None


class Success(msgspec.Struct):
    """It is done, or begun."""

    success: bool = True


class RouterStatus(msgspec.Struct, kw_only=True):
    """A model's state, in llama.cpp's words. `failed`: its last load failed, and `error` says why.

    The `progress` of a load is its `stages` in their order, the `current` one, and the `value` of all of it, 0 to 1.
    That of a download has `done` and `total` bytes by the model's name.
    """

    value: Literal["unloaded", "loading", "loaded", "downloading"]
    failed: bool | UnsetType = UNSET
    error: str | UnsetType = UNSET
    progress: dict[str, Any] | UnsetType = UNSET


class Modalities(msgspec.Struct, kw_only=True):
    """What a model takes and gives."""

    input_modalities: list[str]
    output_modalities: list[str]


class RouterCard(ModelCard, kw_only=True):
    """One model of several.

    `memory_bytes` is what it takes while it is loaded, once that is known, and `file_bytes` the size of its files, 0 if
    they are not here yet. `requests` use it now. `can_remove` says whether DELETE can delete it. `expires_at` is when
    it will be unloaded, in seconds since 1970.
    """

    aliases: list[str] = msgspec.field(default_factory=list)
    status: RouterStatus
    architecture: Modalities
    source: Literal["preset", "models_dir", "download"]
    can_remove: bool = False
    pinned: bool = False
    file_bytes: int = 0
    memory_bytes: int | None = None
    requests: int = 0
    expires_at: float | None = None


class RouterModels(msgspec.Struct, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[RouterCard]


class ModelEvent(msgspec.Struct, kw_only=True):
    """An event of `/models/sse`."""

    model: str
    event: Literal[
        "model_status",
        "download_progress",
        "download_finished",
        "download_failed",
        "model_remove",
        "models_reload",
    ]
    data: dict[str, Any] | UnsetType = UNSET


class RouterProps(msgspec.Struct, kw_only=True):
    """What a server with several models says of itself."""

    role: Literal["router"] = "router"
    max_instances: int
    models_autoload: bool = True
    build_info: str
