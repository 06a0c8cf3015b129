"""`/v1/models`: the names that are served."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec


class ModelPermission(msgspec.Struct, kw_only=True):
    """What OpenAI once told of a model. Old clients want it, as vLLM has it; it says nothing of this server's keys."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name. `root` is the model behind it, `max_model_len` the context in tokens.

    An adapter has a `parent`. `chat_sampling` are fields for the requests of clients that people write to, where these
    say nothing else: the model suggests no sampling. `input_modalities` has "image" if messages may have images.
    `output_modalities` are "embeddings", "scores" or "classes" of a model that writes no text.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tidewheel"
    root: str
    parent: str | None = None
    max_model_len: int
    chat_sampling: dict[str, float | int] | None = None
    input_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    output_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    permission: list[ModelPermission] = []

    def __post_init__(self) -> None:
        if not self.permission:
            digest = hashlib.sha256(self.id.encode()).hexdigest()[:32]
            self.permission = [ModelPermission(id=f"modelperm-{digest}", created=self.created)]


class ModelList(msgspec.Struct, kw_only=True):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
