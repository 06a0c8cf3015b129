"""What adapters add to products, for tokens that have one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...weights.lora import LoraAdapter, LowRankUpdate


class Loras:
    """The adapters of a model by number. `of_tokens [T]` are those of the tokens of a pass, -1: none."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.of_tokens: Tensor | None = None
        self._dtype = dtype
        self._updates: dict[int, dict[str, list[LowRankUpdate]]] = {}

    def load(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter."""
        by_name: dict[str, list[LowRankUpdate]] = {}
        for update in adapter.updates:
            by_name.setdefault(update.name, []).append(update)
        self._updates[number] = by_name

    def drop(self, number: int) -> None:
        """Forget an adapter."""
        self._updates.pop(number, None)

    def add(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y [T, outputs]` and what the tokens' adapters add to the product of `x [T, inputs]` with that matrix."""
        if self.of_tokens is None:
            return y
        for number in set(self.of_tokens.tolist()) - {-1}:
            rows = self.of_tokens == number
            for update in self._updates[number].get(name, ()):
                outputs = slice(update.first_output, update.first_output + len(update.b))
                y[rows, outputs] += update.scale * self._product(update, x[rows])
        return y

    def _product(self, update: LowRankUpdate, x: Tensor) -> Tensor:
        a, b = (torch.from_numpy(array).to(self._dtype).float() for array in (update.a, update.b))
        bias = None if update.bias is None else torch.from_numpy(update.bias).to(self._dtype).float()
        return functional.linear(functional.linear(x, a), b, bias)
