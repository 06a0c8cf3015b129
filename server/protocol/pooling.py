"""`/v1/pooling` and `/v1/classify`."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidewheel.engine.encoders.tasks import Task

from .embeddings import InputUsage, TextsRequest, VectorsRequest


class PoolingRequest(VectorsRequest, kw_only=True):
    """Texts or token ids, and what to make of them; without a `task` the model's main one."""

    task: Task | None = None


class Pooled(msgspec.Struct, kw_only=True):
    """What was made of one input: a list of numbers, or one for each token; or base64 of their little-endian float32.

    In `sparse` each row is a token id and its weight.
    """

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class PoolingList(msgspec.Struct, kw_only=True):
    """An answer, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: InputUsage


class ClassificationRequest(TextsRequest, kw_only=True):
    """Texts or token ids to classify."""


class Classified(msgspec.Struct, kw_only=True):
    """The most probable label of one input, and what there is for each label, in the order of the model's."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    """An answer, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: InputUsage
