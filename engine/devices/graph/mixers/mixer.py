"""What a mixer is to the decoder, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ....errors import DeviceError
from ....models.spec import KvShape, MixerSpec, RopeSpec
from ..attention import Attend
from ..caches import KvCache, States
from ..loras import ExpertUpdates, LoraSlots, LoraUpdate
from ..operations import Rotate
from ..weights import Linear, Weights


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a launch: S sequences, Q tokens each, G cache groups with tables of W blocks.

    `positions [S, Q]`, `slots [G, S, Q]` of the caches that the tokens' K and V are written to, `tables [G, S, W]`, for
    each group the plan of attention, and for each rope of the model the cosines and sines of the tokens' angles,
    `[S, Q, pairs]`.

    The first `lengths [S]` tokens of each sequence are not padding. Recurrent mixers keep its state in `state_slots
    [S]`. `adapters [S, 1, adapters]` are 1 for the adapter that a sequence has and 0 for others; None: there are none.
    `per_layer [S, Q, layers, size]` is each layer's input, in models with per-layer embeddings.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    plans: Sequence[Sequence[Tensor]]
    rotations: Sequence[tuple[Tensor, Tensor]]
    lengths: Tensor
    state_slots: Tensor
    adapters: Tensor | None = None
    per_layer: Tensor | None = None

    @property
    def begins(self) -> Tensor:
        """Which sequences begin, `[S]`."""
        return self.positions[:, 0] == 0

    @property
    def are_real(self) -> Tensor:
        """Which tokens are not padding, `[S, Q]`."""
        columns = torch.arange(self.positions.shape[1], device=self.positions.device)
        return columns < self.lengths[:, None]


class Mixer(Protocol):
    """A mixer of one layer. What it keeps of earlier tokens is in caches and states of its `Parts`."""

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mixer's output for `x [S, Q, hidden]`, in the same shape."""
        ...


class Product:
    """`x W^T`, with the bias if there is one, and what the sequences' adapters add. `x [S, Q, in_features]`."""

    def __init__(self, linear: Linear, update: LoraUpdate | None) -> None:
        self._linear, self._update = linear, update

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """`[S, Q, out_features]`."""
        product = self._linear(x)
        if self._update is None or tokens.adapters is None:
            return product
        return self._update.added(product, x, tokens.adapters)


@dataclass(frozen=True, slots=True)
class Parts:
    """What mixers are made from: the weights, the layout of the KV cache, how to attend, and each kind's class.

    `caches` are those of the attention layers so far, by the layer's name, and `states` those of recurrent layers.
    """

    weights: Weights
    shapes: Mapping[str, tuple[int, ...]]  # of the weights
    windows: Sequence[int | None]  # of each cache group
    ropes: Sequence[RopeSpec]  # the model's, each once
    block_size: int
    cache_dtype: torch.dtype
    device: torch.device
    attend: Attend
    add_up: Callable[[Tensor], Tensor] | None  # sums what all parts of a shared model give; None: there are no others
    rotate: Rotate | None  # the device's own rope; None: it has none
    loras: LoraSlots | None
    kinds: Mapping[str, Callable[[Any, str, Parts], Mixer]]
    caches: dict[str, KvCache] = field(default_factory=dict)
    states: list[States] = field(default_factory=list)

    def mixer(self, spec: MixerSpec, layer: str) -> Mixer:
        """The mixer of a residual block, whose weights' names begin with `layer`.

        Raises DeviceError for an unknown kind.
        """
        if spec.kind not in self.kinds:
            raise DeviceError(f"graph devices have no {spec.kind}")
        return self.kinds[spec.kind](spec, layer, self)

    def product(self, name: str) -> Product:
        """The linear layer of that name, which adapters may change."""
        outputs, inputs = self.shapes[f"{name}.weight"]
        update = None if self.loras is None else self.loras.update(name, outputs, inputs)
        return Product(self.weights.linear(name), update)

    def expert_updates(self, layer: str, name: str, count: int) -> ExpertUpdates | None:
        """What adapters may change of the experts' matrices of that name; None: nothing."""
        if self.loras is None:
            return None
        names = [f"{layer}.experts.{expert}.{name}" for expert in range(count)]
        return self.loras.updates_of_experts(names, *self.shapes[f"{names[0]}.weight"])

    def cache(self, layer: str, shape: KvShape) -> KvCache:
        """A new cache for the K and V of a layer."""
        group = self.windows.index(shape.window)
        self.caches[layer] = KvCache(shape, group, self.block_size, self.cache_dtype, self.device)
        return self.caches[layer]

    def state(self, *shape: int) -> States:
        """A new part of recurrent state, of that shape for each sequence."""
        self.states.append(States(shape, self.device))
        return self.states[-1]
