"""What layers are made of."""

from __future__ import annotations

from collections.abc import Iterator

from .alt_up import AltUpSpec
from .branch import LayerSpec, MixerSpec, ParallelSpec


def mixers(layer: LayerSpec) -> Iterator[MixerSpec]:
    """The mixers of a layer, in the order of its branches.

    A ParallelSpec gives its own mixers one by one, an AltUpSpec itself and then its own.
    """
    for branch in layer:
        if isinstance(branch.mixer, ParallelSpec):
            yield from mixers(branch.mixer.branches)
            continue
        yield branch.mixer
        if isinstance(branch.mixer, AltUpSpec):
            yield from mixers((*branch.mixer.branches, branch.mixer.told))
