"""What a mixer is to the decoder, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ....errors import DeviceError
from ....models.spec import MixerSpec, RopeSpec
from ..weights import Weights


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a pass: `positions [T]`, and `block_tables [T, max_blocks]` with each token's own row.

    Ropes turn by `rope_positions [T]`, or by `axis_positions [A, T]` where both they and the tokens have axes. Those
    are not whole numbers where adapters stretch them. Where attention is two-way, a token sees the positions below its
    `visible_until [T]`. There are tables for each cache group, by its window. `state_slots [T]` say where recurrent
    mixers keep the state of each token's sequence; None if the model has none. `per_layer [T, layers, size]` is each
    layer's input for a token, in models with per-layer embeddings.
    """

    positions: Tensor
    rope_positions: Tensor
    state_slots: Tensor | None
    block_tables: Mapping[int | None, Tensor]
    per_layer: Tensor | None = None
    axis_positions: Tensor | None = None
    visible_until: Tensor | None = None

    def turned_by(self, rope: RopeSpec) -> Tensor:
        """The positions that each pair of dimensions turns by, `[T, pairs]`, or `[T, 1]` if they are the same."""
        if self.axis_positions is None or not rope.axes:
            return self.rope_positions[:, None]
        return self.axis_positions[list(rope.axes)].T


class Mixer(Protocol):
    """A mixer of one layer, with what it remembers of earlier tokens."""

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mixer's output for `x [T, hidden]`, in the same shape."""
        ...

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Copy what is remembered in the blocks `source [N]` to `target [N]`, of the group with that window."""
        ...

    def copy_state(self, source: int, target: int) -> None:
        """Copy what is remembered in the slot `source` of recurrent state to `target`."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What mixers are made from: the weights, the sizes of the cache, and each kind's class."""

    weights: Weights
    num_blocks: Mapping[int | None, int]  # by the window of the cache group
    block_size: int
    num_states: int  # slots of recurrent state
    cache_dtype: torch.dtype
    kinds: Mapping[str, Callable[[Any, str, Parts], Mixer]]
    caches: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # K and V by layer, for those who share them

    def mixer(self, spec: MixerSpec, layer: str) -> Mixer:
        """The mixer of a residual block, whose weights' names begin with `layer`.

        Raises DeviceError for an unknown kind.
        """
        if spec.kind not in self.kinds:
            raise DeviceError(f"the torch device has no {spec.kind}")
        return self.kinds[spec.kind](spec, layer, self)
