"""The labels of a classifier, and how its logits become probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import shown
from .pooling import Floats

ClassActivation = Literal["sigmoid", "softmax"]

_NAMED: Mapping[str, ClassActivation | None] = {"Identity": None, "Sigmoid": "sigmoid", "Softmax": "softmax"}
_PROBLEM_TYPES: Mapping[str, ClassActivation | None] = {
    "regression": None,
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_MAX_LABELS = 2**17  # more than any model has


def activated(logits: NDArray[np.floating[Any]], activation: ClassActivation) -> Floats:
    """Logits `[..., labels]` as probabilities. Computed in float64."""
    exact = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        if activation == "sigmoid":
            probabilities = 1 / (1 + np.exp(-exact))
        else:
            powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
            probabilities = powers / powers.sum(axis=-1, keepdims=True)
    result: Floats = probabilities.astype(np.float32)
    return result


def labels_of(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of a config.json, as transformers reads it: two where it does not say. Raises ModelError."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        try:
            labels = {int(key): str(label) for key, label in named.items()}
        except ValueError:
            labels = {}
        if sorted(labels) != list(range(len(named))):
            raise ModelError(f"{path}: the keys of id2label must be the numbers from 0 to {len(named) - 1}")
        return tuple(labels[i] for i in range(len(labels)))
    count = config.get("num_labels", 2)
    if not isinstance(count, int) or not 1 <= count <= _MAX_LABELS:
        raise ModelError(f"{path}: num_labels must be a number from 1 to {_MAX_LABELS}, got {shown(count)}")
    return tuple(f"LABEL_{i}" for i in range(count))


def activation_of(
    path: Path, config: Mapping[str, Any], settings_path: Path, settings: Mapping[str, Any], *, num_labels: int
) -> ClassActivation | None:
    """What makes probabilities of logits: what sentence-transformers wrote (`settings` are its file's), else what
    transformers' `problem_type` says, else a sigmoid for one label and softmax for several. Raises ModelError.

    Identity counts for one label only: sentence-transformers writes it for several without having been told to.
    """
    own = config.get("sentence_transformers")
    name = settings.get("activation_fn")
    if name:
        path = settings_path
    else:
        name = (own.get("activation_fn") if isinstance(own, dict) else None) or config.get(
            "sbert_ce_default_activation_function"
        )
    if name:
        kind = str(name).rpartition(".")[2]
        if kind not in _NAMED:
            raise ModelError(f"{path} has the activation {shown(name)}; known are {', '.join(_NAMED)}")
        if num_labels == 1 or _NAMED[kind] is not None:
            return _NAMED[kind]
    default: ClassActivation = "sigmoid" if num_labels == 1 else "softmax"
    chosen = _PROBLEM_TYPES.get(str(config.get("problem_type")), default)
    return "sigmoid" if chosen == "softmax" and num_labels == 1 else chosen
