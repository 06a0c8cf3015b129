"""What layers keep of sequences on the device: K and V in blocks, and recurrent state in slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.spec import KvShape


class KvCache:
    """K `[slots, heads, key_dim]` and V `[slots, heads, value_dim]` of a layer: slot `block * block_size + offset`.

    It lies in the cache group with the number `group`. Where V is a part of K, it is the first numbers of it.
    """

    def __init__(self, shape: KvShape, group: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self._shape, self._block_size, self._dtype, self._device = shape, block_size, dtype, device
        self.allocate(0)

    def allocate(self, num_blocks: int) -> None:
        """Make room for that many blocks, and forget all that was kept."""
        slots, shape = num_blocks * self._block_size, self._shape
        self.keys = self._zeros(slots, shape.num_heads, shape.key_dim)
        self._values = None if shape.values_in_keys else self._zeros(slots, shape.num_heads, shape.value_dim)

    @property
    def values(self) -> Tensor:
        """V. A part of K is taken anew: two tensors in one memory would keep torch.compile from writing in place."""
        return self.keys[..., : self._shape.value_dim] if self._values is None else self._values

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Keep the K and V of tokens in `slots [S, Q]`, both `[S, Q, heads, dim]`. V is None where it is in K."""
        places = (slots.flatten(),)
        self.keys.index_put_(places, keys.to(self._dtype).flatten(0, 1))
        if values is not None and self._values is not None:
            self._values.index_put_(places, values.to(self._dtype).flatten(0, 1))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the slots `source [N]` to `target [N]`."""
        self.keys.index_put_((target,), self.keys[source])
        if self._values is not None:
            self._values.index_put_((target,), self._values[source])

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


class States:
    """A part of a layer's recurrent state, `[slots, *shape]` float32. The last slot is for padding."""

    def __init__(self, shape: Sequence[int], device: torch.device) -> None:
        self._shape, self._device = tuple(shape), device
        self.allocate(0)

    def allocate(self, num_slots: int) -> None:
        """Make room for that many slots, and forget all that was kept."""
        self._values = torch.zeros((num_slots, *self._shape), device=self._device)

    def read(self, slots: Tensor, begins: Tensor) -> Tensor:
        """The state of the sequences in `slots [S]`, `[S, *shape]`: zeros of one that `begins [S]`."""
        return self._values[slots].masked_fill(begins.view(-1, *(1 for _ in self._shape)), 0.0)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Keep `values [S, *shape]`."""
        self._values.index_put_((slots,), values)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the slots `source [N]` to `target [N]`. None is copied both from and to, except padding to itself."""
        self._values.index_put_((target,), self._values[source])
