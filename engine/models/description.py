"""ModelDescription: a model as its family describes it, from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .spec import DecoderSpec
from .tensor_ref import TensorRef


def _nowhere(name: str) -> tuple[TensorRef, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A decoder, and where its weights are in the family's checkpoints.

    `tensors` has the keys of `tensor_shapes(spec)`. Some checkpoints were saved from the bare decoder: their names do
    not begin with `base_prefix`. `head_name` is the family's name of the head. If the head is tied, a checkpoint may
    hold the head, the embedding, or both. A `text_part` lies in a checkpoint of a model that takes images or sound too.
    `otherwise` says where a weight is in checkpoints that do not have it where `tensors` says: at the first of these
    places that has its shape. `architecture` is the
    decoder's own, as configs name it.
    """

    spec: DecoderSpec
    tensors: Mapping[str, TensorRef]
    base_prefix: str
    head_name: str = "lm_head.weight"
    text_part: bool = False
    otherwise: Callable[[str], tuple[TensorRef, ...]] = _nowhere
    architecture: str = ""
