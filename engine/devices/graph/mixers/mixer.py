"""What a mixer is to the decoder, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ....errors import DeviceError
from ....models.spec import MixerSpec, RopeSpec
from ..attention import Attend
from ..operations import Rotate
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a launch: S sequences, Q tokens each, G cache groups with tables of W blocks.

    `positions [S, Q]`, `slots [G, S, Q]` of the caches that the tokens' K and V are written to, `tables [G, S, W]`, for
    each group the plan of attention, and for each rope of the model the cosines and sines of the tokens' angles,
    `[S, Q, pairs]`.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    plans: Sequence[Sequence[Tensor]]
    rotations: Sequence[tuple[Tensor, Tensor]]


class Mixer(Protocol):
    """A mixer of one layer, with what it remembers of earlier tokens."""

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mixer's output for `x [S, Q, hidden]`, in the same shape."""
        ...

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make room for that many blocks of each cache group, and forget all that was remembered."""
        ...

    def copy_slots(self, source: Tensor, target: Tensor, group: int) -> None:
        """Copy what is remembered in the slots `source [N]` to `target [N]` of a cache group."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What mixers are made from: the weights, the layout of the KV cache, how to attend, and each kind's class."""

    weights: Weights
    windows: Sequence[int | None]  # of each cache group
    ropes: Sequence[RopeSpec]  # the model's, each once
    block_size: int
    cache_dtype: torch.dtype
    device: torch.device
    attend: Attend
    add_up: Callable[[Tensor], Tensor] | None  # sums what all parts of a shared model give; None: there are no others
    rotate: Rotate | None  # the device's own rope; None: it has none
    kinds: Mapping[str, Callable[[Any, str, Parts], Mixer]]

    def mixer(self, spec: MixerSpec, layer: str) -> Mixer:
        """The mixer of a residual block, whose weights' names begin with `layer`.

        Raises DeviceError for an unknown kind.
        """
        if spec.kind not in self.kinds:
            raise DeviceError(f"graph devices have no {spec.kind}")
        return self.kinds[spec.kind](spec, layer, self)
