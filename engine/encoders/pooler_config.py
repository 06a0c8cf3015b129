"""`--pooler-config`: vLLM's PoolerConfig, as far as it means something here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..files.wording import shown

POOLING: Mapping[str, str] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
"""Its pooling types, and what they are called here."""
_NO_TOKENS = 'texts have one vector each: for one of each token, requests to /pooling have "task": "token_embed"'
NO_STEPS = (
    'scores are not picked at single tokens: requests to /pooling have "task": "token_classify", and their answers all '
    "tokens"
)
"""What to do instead of having scores of some tokens, which vLLM's reward models of steps have."""
_NO_PIECES = "texts are not split: send their parts"
_REFUSED = {
    "step_tag_id": NO_STEPS,
    "returned_token_ids": NO_STEPS,
    "enable_chunked_processing": _NO_PIECES,
    "max_embed_len": _NO_PIECES,
    "logit_bias": "logits are given as the model computes them",
    "logit_mean": "logits are given as the model computes them",
    "logit_sigma": "logits are given as the model computes them",
}
ACTIVATIONS = ("use_activation", "normalize", "softmax", "activation")
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
                return f"must not have the {name} {kind}, because {_NO_TOKENS if kind == 'ALL' else NO_STEPS}"
            if kind not in POOLING:
                return f"must have a {name} of {', '.join(POOLING)}"
        elif name == "tok_pooling_type":
            if str(value).upper() != "ALL":
                return f"must not have the tok_pooling_type {shown(value)}, because {NO_STEPS}"
        elif name in ACTIVATIONS:
            if not isinstance(value, bool):
                return f"must have true or false as {name}"
        elif name == "dimensions":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                return "must have at least 1 as dimensions"
        else:
            known = ("pooling_type", *ACTIVATIONS[:2], "dimensions")
            return f"must have {', '.join(known)} only, not {shown(name)}"
    said = {given[name] for name in ACTIVATIONS if given.get(name) is not None}
    return f"must not contradict itself: give one of {', '.join(ACTIVATIONS)}" if len(said) > 1 else None
