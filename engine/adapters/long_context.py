"""Adapters that were trained for longer contexts than the model, as with LongLoRA (https://arxiv.org/abs/2309.12307).

Their positions are interpolated: the angles of the model's rope are divided by how many times longer the context is
(https://arxiv.org/abs/2306.15595). Their config has the field `context_length`, which vLLM reads too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import ModelError
from ..models.config import MAX_INTEGER
from ..models.description import ModelDescription
from ..models.rope import rope_type
from ..models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, mixers
from ..models.text_part import text_part

_FLAG = "--long-lora-scaling-factors"


class LongContexts(Struct, frozen=True):
    """The model's `own` context, in tokens, and how many times longer adapters may make it."""

    own: int
    factors: tuple[float, ...] = ()

    @property
    def longest(self) -> int:
        """The longest context of any adapter, in tokens."""
        return int(self.own * max((1.0, *self.factors)))

    def factor(self, path: Path, context_length: int | None) -> float:
        """How many times longer than the model's own the context of an adapter is; 1: it is that.

        A length between two multiples of the model's is rounded up, as vLLM does. Raises ModelError, naming `path`, for
        a factor that was not given.
        """
        if context_length is None or context_length <= self.own:
            return 1.0
        exact = context_length / self.own
        for factor in (exact, float(math.ceil(exact))):
            if factor in self.factors:
                return factor
        given = f", not only {', '.join(map(str, self.factors))}" if self.factors else ""
        raise ModelError(
            f"{path}: context_length {context_length} is {exact:g} times the model's own context of {self.own} tokens: "
            f"start with {_FLAG} {float(math.ceil(exact))}{given}"
        )


def with_longer_contexts(
    description: ModelDescription, config: Mapping[str, Any], factors: tuple[float, ...], max_model_len: int | None
) -> tuple[ModelDescription, LongContexts]:
    """The model with room for the longest of those contexts, and its own context.

    `max_model_len` bounds all contexts. Raises ModelError for a model whose positions cannot be interpolated so, and
    for a `max_model_len` beyond the longest.
    """
    _require_one_plain_rope(description.spec, _text_config(description, config))
    contexts = LongContexts(description.spec.max_positions, factors)
    if contexts.longest > MAX_INTEGER:
        raise ModelError(f"{_FLAG} stretches the context beyond {MAX_INTEGER} tokens")
    if max_model_len is not None and max_model_len > contexts.longest:
        raise ModelError(
            f"a context of {max_model_len} tokens is more than this model's {contexts.own}, and more than the "
            f"{contexts.longest} of {_FLAG}"
        )
    return replace(description, spec=replace(description.spec, max_positions=contexts.longest)), contexts


def _text_config(description: ModelDescription, config: Mapping[str, Any]) -> Mapping[str, Any]:
    return text_part(config["architectures"][0], config) if description.text_part else config


def _require_one_plain_rope(spec: DecoderSpec, config: Mapping[str, Any]) -> None:
    attentions = [
        mixer
        for layer in spec.layers
        for mixer in mixers(layer)
        if isinstance(mixer, AttentionSpec | LatentAttentionSpec)
    ]
    ropes = {mixer.rope for mixer in attentions if mixer.rope is not None}
    others = spec.embedding.num_positions or any(
        isinstance(mixer, AttentionSpec) and (mixer.alibi_slopes or mixer.query_temperature) for mixer in attentions
    )
    kind = rope_type(config)
    if others or len(ropes) != 1 or kind != "default":
        what = "does not use one rope in all layers" if others or len(ropes) != 1 else f"has a rope of {kind}"
        raise ModelError(f"{_FLAG} needs a model with one unscaled rope, and this one {what}: leave it out")
