"""as_asked: an encoder as the options of a command change it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .classification import ClassActivation
from .description import EncoderDescription
from .pooler_config import ACTIVATIONS, POOLING
from .settings import EncoderSettings

logger = logging.getLogger(__name__)


def as_asked(description: EncoderDescription, settings: EncoderSettings) -> EncoderDescription:
    """The encoder as the settings change it. Raises ModelError for what it cannot be."""
    if description.graph is not None and settings.dtype != "auto":
        if settings.is_main:
            raise ModelError(
                f"{description.graph} has a type of its own: leave --dtype, --quantization and --embedding-dtype out"
            )
        logger.info("--embedding-dtype has no effect on %s, which has a type of its own", description.graph)
    if settings.pooler is not None:
        description = _pooled(description, settings.pooler)
    if (longest := settings.max_length) is not None:
        if longest > description.max_length:
            raise ModelError(
                f"--max-model-len {longest} is more than the {description.max_length} tokens that the model takes"
            )
        description = replace(description, max_length=longest)
    wanted = {"embed": False, "classify": True}.get(settings.convert)
    if wanted is not None and wanted != bool(description.labels):
        found = "classifies" if description.labels else "gives embeddings"
        raise ModelError(
            f"--convert {settings.convert} does not fit {description.folder}, which {found}: leave --convert out"
        )
    return description


def _pooled(description: EncoderDescription, given: Mapping[str, Any]) -> EncoderDescription:
    """The encoder with what a checked config says of it. Raises ModelError for what it cannot have."""
    kind = given.get("pooling_type") or given.get("seq_pooling_type")
    activates = next((given[name] for name in ACTIVATIONS if given.get(name) is not None), None)
    changes: dict[str, Any] = {}
    if description.labels:
        head = None if description.model is None else description.model.head
        reads = head.pooling.upper() if head is not None and head.of == "text" else None
        if given.get("dimensions") is not None or (kind is not None and str(kind).upper() != reads):
            said = "each token" if description.task == "token_classify" else reads
            raise ModelError(
                f"{description.folder} is a classifier, whose head says what it reads{f' ({said})' if said else ''}: "
                "leave pooling_type and dimensions out of --pooler-config"
            )
        if activates is not None:
            usual: ClassActivation = "sigmoid" if len(description.labels) == 1 else "softmax"
            changes["activation"] = (description.activation or usual) if activates else None
        return replace(description, **changes)
    if description.task != "embed" and (kind is not None or (activates is not None and description.task == "sparse")):
        raise ModelError(
            f"{description.folder} is a model for {description.task}, which has no pooling to choose: leave "
            "pooling_type out of --pooler-config, and for sparse vectors use_activation"
        )
    changes["is_pooled_as_asked"] = kind is not None or activates is not None
    if kind is not None:
        changes["pooling"] = (POOLING[str(kind).upper()],)
    if activates is not None:
        changes["normalize"] = activates
    if given.get("dimensions") is not None:
        changes["dimensions"] = given["dimensions"]
    return replace(description, **changes)
