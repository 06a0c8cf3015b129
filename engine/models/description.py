"""ModelDescription: what a family makes of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .spec import DecoderSpec
from .tensor_ref import TensorRef


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A decoder, and where its weights lie in the family's checkpoints.

    `tensors` has the keys of `tensor_shapes(spec)`. Some checkpoints were saved from the bare decoder and lack
    `base_prefix` at the start of every name. `head_name` is what the family calls the head; where the head is tied
    it is redundant, and a checkpoint may hold it, the embedding, or both.
    """

    spec: DecoderSpec
    tensors: Mapping[str, TensorRef]
    base_prefix: str
    head_name: str = "lm_head.weight"
