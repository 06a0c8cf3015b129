"""What adapters add to products, for tokens that have one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...weights.lora import EMBED, HEAD, LoraAdapter, LowRankUpdate
from ...weights.tensor import DenseTensor, to_float32


class Loras:
    """The adapters of a model by number. `of_tokens [T]` are the adapters of a pass's tokens, -1: none."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.of_tokens: Tensor | None = None
        self._dtype = dtype
        self._updates: dict[int, dict[str, list[LowRankUpdate]]] = {}
        self._matrices: dict[int, Mapping[str, DenseTensor]] = {}
        self._rope_factors: dict[int, float] = {}

    def load(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter."""
        by_name: dict[str, list[LowRankUpdate]] = {}
        for update in adapter.updates:
            by_name.setdefault(update.name, []).append(update)
        self._updates[number] = by_name
        self._matrices[number] = adapter.matrices
        self._rope_factors[number] = adapter.rope_factor

    def drop(self, number: int) -> None:
        """Forget an adapter."""
        self._updates.pop(number, None)
        self._matrices.pop(number, None)
        self._rope_factors.pop(number, None)

    def rope_positions(self, positions: Tensor) -> Tensor:
        """The positions `[.., T]` that ropes turn the tokens by, as their adapters stretch them."""
        stretched = positions.float()
        for number, rows in self._rows():
            stretched[..., rows] /= self._rope_factors[number]
        return stretched

    def add(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y [T, outputs]` and what the tokens' adapters add to the product of `x [T, inputs]` with that matrix."""
        for number, rows in self._rows():
            for update in self._updates[number].get(name, ()):
                outputs = slice(update.first_output, update.first_output + len(update.b))
                y[rows, outputs] += update.scale * self._product(update, x[rows])
                if update.shift is not None:
                    y[rows, outputs] += self._rounded(update.shift)
        return y

    @contextmanager
    def only(self, rows: Tensor) -> Iterator[None]:
        """Products of these tokens alone."""
        all_tokens = self.of_tokens
        if all_tokens is not None:
            self.of_tokens = all_tokens[rows]
        try:
            yield
        finally:
            self.of_tokens = all_tokens

    def embed(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """`x [T, size]`, the tokens' rows in the model's embedding, as their adapters change them."""
        for number, rows in self._rows():
            if EMBED in self._matrices[number]:
                x[rows] = self._matrix(number, EMBED)[token_ids[rows]]
            for update in self._updates[number].get(EMBED, ()):
                a, b = self._rounded(update.a), self._rounded(update.b)
                x[rows] += update.scale * functional.linear(a.T[token_ids[rows]], b)
        return x

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """`y [R, vocab]`, the products of `x [R, size]` with the model's head, as the rows' adapters change them."""
        for number, rows in self._rows():
            if HEAD in self._matrices[number]:
                y[rows] = functional.linear(x[rows], self._matrix(number, HEAD))
        return self.add(HEAD, x, y)

    def _rows(self) -> Iterator[tuple[int, Tensor]]:
        """Each adapter that tokens have, and which tokens have it."""
        if self.of_tokens is not None:
            for number in sorted(set(self.of_tokens.tolist()) - {-1}):
                yield number, self.of_tokens == number

    def _matrix(self, number: int, name: str) -> Tensor:
        return self._rounded(to_float32(self._matrices[number][name]))

    def _rounded(self, array: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(self._dtype).float()

    def _product(self, update: LowRankUpdate, x: Tensor) -> Tensor:
        bias = None if update.bias is None else self._rounded(update.bias)
        return functional.linear(functional.linear(x, self._rounded(update.a)), self._rounded(update.b), bias)
