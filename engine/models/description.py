"""ModelDescription: a model as its family describes it, from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..declaring.record import record
from .spec import DecoderSpec, MtpSpec
from .tensor_ref import TensorRef


def _nowhere(name: str) -> tuple[TensorRef, ...]:
    return ()


@record(frozen=True, slots=True)
class MtpDescription:
    """A layer for drafts that checkpoints of a model may have, and where its weights are in them.

    `tensors` has the keys that `tensor_shapes` has for it.
    """

    spec: MtpSpec
    tensors: Mapping[str, TensorRef]


@record(frozen=True, slots=True)
class ModelDescription:
    """A decoder, and where its weights are in the family's checkpoints.

    `tensors` has the keys of `tensor_shapes(spec)`. Some checkpoints were saved from the bare decoder: their names do
    not begin with `base_prefix`. `head_name` is the family's name of the head. If the head is tied, a checkpoint may
    hold the head, the embedding, or both. A `text_part` lies in a checkpoint of a model that takes images or sound too.
    `otherwise` has other places of weights, for checkpoints that do not have them where `tensors` says: the first place
    with the right shape counts. `architecture` is the decoder's own, as configs name it. `mtp` is the layer for drafts
    that such checkpoints may have; it is part of `spec` only if it is used. `skipped_layers` are layers of the
    checkpoint that text does not pass, in order; the other layers are counted without them. `tower_tensors` are those
    of the checkpoint that a tower beside the decoder has.
    """

    spec: DecoderSpec
    tensors: Mapping[str, TensorRef]
    base_prefix: str
    head_name: str = "lm_head.weight"
    text_part: bool = False
    otherwise: Callable[[str], tuple[TensorRef, ...]] = _nowhere
    architecture: str = ""
    mtp: MtpDescription | None = None
    skipped_layers: tuple[int, ...] = ()
    tower_tensors: frozenset[str] = frozenset()

    def with_mtp(self) -> ModelDescription:
        """The same description with its layer for drafts in use. Raises ValueError if there is none."""
        if self.mtp is None:
            raise ValueError(f"{self.architecture} has no layer for drafts")
        spec = replace(self.spec, mtp=self.mtp.spec)
        return replace(self, spec=spec, tensors={**self.tensors, **self.mtp.tensors})
