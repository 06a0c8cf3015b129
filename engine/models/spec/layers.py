"""What layers are made of."""

from __future__ import annotations

from collections.abc import Iterator

from .alt_up import AltUpSpec
from .residual_block import LayerSpec, MixerSpec, ParallelSpec


def mixers(layer: LayerSpec) -> Iterator[MixerSpec]:
    """The mixers of a layer, in the order of its residual blocks.

    A ParallelSpec gives its own mixers one by one, an AltUpSpec itself and then its own.
    """
    for residual in layer:
        if isinstance(residual.mixer, ParallelSpec):
            yield from mixers(residual.mixer.residuals)
            continue
        yield residual.mixer
        if isinstance(residual.mixer, AltUpSpec):
            yield from mixers((*residual.mixer.residuals, residual.mixer.passive))
