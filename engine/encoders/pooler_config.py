"""`--pooler-config`: vLLM's PoolerConfig, as far as it means something here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..files.wording import shown

if TYPE_CHECKING:
    from .classification import ClassActivation
    from .description import EncoderDescription

_POOLING = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
_NO_TOKENS = 'texts have one vector each: for one of each token, requests to /pooling have "task": "token_embed"'
_NO_STEPS = (
    'scores are not picked at single tokens: requests to /pooling have "task": "token_classify", and their answers all '
    "tokens"
)
_NO_PIECES = "texts are not split: send their parts"
_REFUSED = {
    "step_tag_id": _NO_STEPS,
    "returned_token_ids": _NO_STEPS,
    "enable_chunked_processing": _NO_PIECES,
    "max_embed_len": _NO_PIECES,
    "logit_bias": "logits are given as the model computes them",
    "logit_mean": "logits are given as the model computes them",
    "logit_sigma": "logits are given as the model computes them",
}
_ACTIVATIONS = ("use_activation", "normalize", "softmax", "activation")
"""The names that versions of vLLM have for it: the normalizing of embeddings, and what logits go through."""


def check_pooler_config(given: Mapping[str, Any]) -> str | None:
    """What is wrong with a config, in words: it must be so. None if nothing is."""
    for name, value in given.items():
        if value is None or (name in _REFUSED and value in (False, 0)):
            continue
        if name in _REFUSED:
            return f"must not have {name}, because {_REFUSED[name]}"
        if name in ("pooling_type", "seq_pooling_type"):
            kind = str(value).upper()
            if kind in ("ALL", "STEP"):
                return f"must not have the {name} {kind}, because {_NO_TOKENS if kind == 'ALL' else _NO_STEPS}"
            if kind not in _POOLING:
                return f"must have a {name} of {', '.join(_POOLING)}"
        elif name == "tok_pooling_type":
            if str(value).upper() != "ALL":
                return f"must not have the tok_pooling_type {shown(value)}, because {_NO_STEPS}"
        elif name in _ACTIVATIONS:
            if not isinstance(value, bool):
                return f"must have true or false as {name}"
        elif name == "dimensions":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                return "must have at least 1 as dimensions"
        else:
            known = ("pooling_type", *_ACTIVATIONS[:2], "dimensions")
            return f"must have {', '.join(known)} only, not {shown(name)}"
    said = {given[name] for name in _ACTIVATIONS if given.get(name) is not None}
    return f"must not contradict itself: give one of {', '.join(_ACTIVATIONS)}" if len(said) > 1 else None


def with_pooler_config(description: EncoderDescription, given: Mapping[str, Any]) -> EncoderDescription:
    """The encoder with what a checked config says of it. Raises ModelError for what it cannot have."""
    kind = given.get("pooling_type") or given.get("seq_pooling_type")
    activates = next((given[name] for name in _ACTIVATIONS if given.get(name) is not None), None)
    changes: dict[str, Any] = {}
    if description.labels:
        if kind is not None or given.get("dimensions") is not None:
            raise ModelError(
                f"{description.folder} is a classifier, whose head says what it reads: --pooler-config may have only "
                "use_activation"
            )
        if activates is not None:
            usual: ClassActivation = "sigmoid" if len(description.labels) == 1 else "softmax"
            changes["activation"] = (description.activation or usual) if activates else None
        return replace(description, **changes)
    changes["is_pooled_as_asked"] = kind is not None or activates is not None
    if kind is not None:
        changes["pooling"] = (_POOLING[str(kind).upper()],)
    if activates is not None:
        changes["normalize"] = activates
    if given.get("dimensions") is not None:
        changes["dimensions"] = given["dimensions"]
    return replace(description, **changes)
