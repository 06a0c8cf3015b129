"""LoRA adapters in launches of fixed shapes: each matrix has room for as many adapters as may share a step.

All of them compute every token together, as one product of the widths of their ranks. What belongs to another adapter
than the token's is then multiplied by 0, so that a graph serves any mix of adapters and tokens without one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...errors import DeviceError
from ...weights.lora import LoraAdapter, LowRankUpdate
from ..expert_adapters import NO_ROOM_FOR_EXPERTS, of_expert
from ..limits import LoraLimits


class LoraUpdate:
    """What L adapters of ranks up to r add to a product: their A below each other, `[L * r, inputs]`, and B side by
    side, `[outputs, L * (r + 1)]`. The last column of each is a bias.
    """

    def __init__(
        self, inputs: int, outputs: int, count: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inputs, self._outputs, self._count, self._rank = inputs, outputs, count, rank
        self.a = torch.zeros((count * rank, inputs), dtype=dtype, device=device)
        self.b = torch.zeros((outputs, count * (rank + 1)), dtype=dtype, device=device)

    def added(self, product: Tensor, x: Tensor, adapters: Tensor) -> Tensor:
        """The product, and what the adapters add to it for `x [..., inputs]`. `adapters [..., L]` are as in Tokens."""
        return product + self._raised(functional.linear(x.to(self.a.dtype), self.a), adapters)

    def looked_up(self, token_ids: Tensor, adapters: Tensor) -> Tensor:
        """What they add to the embeddings of `token_ids [S, Q]`, which are the inputs."""
        return self._raised(self.a.T[token_ids], adapters)

    def write(self, slot: int, updates: Sequence[LowRankUpdate]) -> None:
        """Put an adapter into one of the L slots; without updates it adds nothing."""
        rank = self._rank
        a, b = np.zeros((rank, self._inputs), np.float32), np.zeros((self._outputs, rank + 1), np.float32)
        first = 0
        for update in updates:
            outputs = slice(update.first_output, update.first_output + len(update.b))
            b[outputs, first : first + update.rank] = update.scale * update.b
            a[first : first + update.rank] = update.a
            first += update.rank
            if update.bias is not None:
                b[outputs, rank] += update.scale * update.bias
            if update.shift is not None:
                b[outputs, rank] += update.shift
        self.a[slot * rank : (slot + 1) * rank].copy_(torch.from_numpy(a))
        self.b[:, slot * (rank + 1) : (slot + 1) * (rank + 1)].copy_(torch.from_numpy(b))

    def own(self, inner: Tensor, adapters: Tensor) -> Tensor:
        """Of what A gives, `[..., L * r]`, what is of the token's adapter, as B takes it, `[..., L * (r + 1)]`."""
        own = adapters[..., None].to(self.a.dtype)
        inner = torch.unflatten(inner, -1, (self._count, self._rank)) * own
        return torch.cat((inner, own.expand(*inner.shape[:-1], 1)), -1).flatten(-2)

    def _raised(self, inner: Tensor, adapters: Tensor) -> Tensor:
        """From what A gives to the outputs."""
        return functional.linear(self.own(inner, adapters), self.b)


class ExpertUpdates:
    """The updates of all experts' matrices of one kind: `a [experts, L * r, inputs]`, `b [experts, outputs, L * (r +
    1)]`, of which each expert's LoraUpdate has its part.
    """

    def __init__(self, updates: Sequence[LoraUpdate]) -> None:
        self.a, self.b = (torch.stack([getattr(update, name) for update in updates]) for name in ("a", "b"))
        self._first = updates[0]
        for expert, update in enumerate(updates):
            update.a, update.b = self.a[expert], self.b[expert]

    def own(self, inner: Tensor, adapters: Tensor) -> Tensor:
        """As LoraUpdate.own."""
        return self._first.own(inner, adapters)


class LoraSlots:
    """The adapters of a model by number, and those that are on the device in `max_loras` slots.

    `rope_factors [max_loras + 1]` are what the positions of sequences are divided by. The last is for those without an
    adapter.
    """

    def __init__(self, limits: LoraLimits, dtype: torch.dtype, device: torch.device) -> None:
        self.count = limits.max_loras
        self.rope_factors = torch.ones(self.count + 1, device=device)
        self._max_rank, self._dtype, self._device = limits.max_rank, dtype, device
        self._of_experts = limits.of_experts
        self._updates: dict[str, LoraUpdate] = {}
        self._adapters: dict[int, LoraAdapter] = {}
        self._slots: dict[LoraAdapter, int] = {}  # of those on the device, the least recently used first
        self._written: list[set[str]] = [set() for _ in range(self.count)]  # matrices that are not zeros, by slot

    def update(self, name: str, outputs: int, inputs: int) -> LoraUpdate:
        """The updates of the matrix with that name."""
        self._updates[name] = LoraUpdate(inputs, outputs, self.count, self._max_rank, self._dtype, self._device)
        return self._updates[name]

    def updates_of_experts(self, names: Sequence[str], outputs: int, inputs: int) -> ExpertUpdates | None:
        """The updates of experts' matrices with these names; None: adapters may not change experts."""
        if not self._of_experts:
            return None
        return ExpertUpdates([self.update(name, outputs, inputs) for name in names])

    def chosen(self, slots: Tensor) -> Tensor:
        """1 for the slot in `slots [N]` and 0 for others, `[N, max_loras]`."""
        return (slots[:, None] == torch.arange(self.count, device=slots.device)).float()

    def load(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter on the host, from any thread. Raises DeviceError for one that changes other matrices."""
        if adapter.matrices:
            raise DeviceError(
                f"this adapter has its own {' and '.join(sorted(adapter.matrices))}, for which accelerators have no "
                "room: take --device cpu"
            )
        ranks: dict[str, int] = {}
        for update in adapter.updates:
            if update.name not in self._updates:
                if of_expert(update.name):
                    raise DeviceError(NO_ROOM_FOR_EXPERTS.format(name=update.name))
                raise DeviceError(
                    f"this adapter changes {update.name}, which accelerators compute without adapters: take --device "
                    "cpu"
                )
            ranks[update.name] = ranks.get(update.name, 0) + update.rank
        for name, rank in ranks.items():
            if rank > self._max_rank:
                raise DeviceError(
                    f"this adapter changes {name} in parts, whose ranks are together {rank}: raise --max-lora-rank to "
                    "that"
                )
        self._adapters[number] = adapter

    def drop(self, number: int) -> None:
        """Forget an adapter that no sequence names any more."""
        if (adapter := self._adapters.pop(number, None)) is not None:
            self._slots.pop(adapter, None)

    def slots_of(self, numbers: NDArray[np.int32] | None, num_sequences: int) -> NDArray[np.int32]:
        """The slots of sequences whose adapters have these `numbers [S]`, -1: none. Copies those that are elsewhere."""
        slots = np.full(num_sequences, self.count, np.int32)
        if numbers is None:
            return slots
        wanted = {number: self._adapters[number] for number in numbers.tolist() if number >= 0}
        for number, adapter in wanted.items():
            placed = self._slots.pop(adapter, None)
            self._slots[adapter] = self._place(adapter, {*wanted.values()}) if placed is None else placed
            slots[numbers == number] = self._slots[adapter]
        return slots

    def _place(self, adapter: LoraAdapter, wanted: Collection[LoraAdapter]) -> int:
        slot: int
        if len(self._slots) < self.count:
            slot = min({*range(self.count)} - {*self._slots.values()})
        else:
            slot = self._slots.pop(next(other for other in self._slots if other not in wanted))
        by_name: dict[str, list[LowRankUpdate]] = {}
        for update in adapter.updates:
            by_name.setdefault(update.name, []).append(update)
        for name in self._written[slot] | by_name.keys():
            self._updates[name].write(slot, by_name.get(name, ()))
        self._written[slot] = {*by_name}
        self.rope_factors[slot] = adapter.rope_factor
        return slot
