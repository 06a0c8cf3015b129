"""The weights, and the two things that everything does with them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from ...models.spec import NormSpec
from ...weights.dtypes import DType
from ...weights.quantization import is_router
from ...weights.tensor import WeightTensor, to_float32
from .loras import Loras

DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Weights:
    """All weights of a model, as float32 that holds the values of `dtype`. Routers keep theirs.

    Products of two such values are exact, and their sum is float32.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, WeightTensor]], dtype: torch.dtype, lora_dtype: torch.dtype = torch.float32
    ) -> None:
        self.loras = Loras(lora_dtype)
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in tensors:
            exact = torch.from_numpy(to_float32(tensor))
            self._tensors[name] = exact if is_router(name) else self._round(exact)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The weight of that name, if there is one."""
        return self._tensors.get(name)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """`x W^T`, with the bias if there is one, and what adapters add. `x [T, in_features]`, returns
        `[T, out_features]`. Both are clipped if there are bounds.
        """
        bounds = self._tensors.get(f"{name}.bounds")
        if bounds is not None:
            return self.product(name, x.clamp(bounds[0], bounds[1])).clamp(bounds[2], bounds[3])
        return self.loras.add(name, x, self.product(name, x, self._tensors.get(f"{name}.bias")))

    def product(self, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T`, with a bias if it is given."""
        return functional.linear(self._round(x), self._tensors[f"{name}.weight"], bias)

    def norm(self, name: str, norm: NormSpec | None, x: Tensor, each: bool = False) -> Tensor:
        """`x` normalized over its last dimension, or as it is where there is no norm.

        `each` of the rows of `x [T, rows, size]` has weights of its own.
        """
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
        if norm.weight:
            weight = self._tensors[f"{name}.weight"].view(x.shape[1:] if each else -1)
            x = x * (1.0 + weight if norm.unit_offset else weight)
        return x + self._tensors[f"{name}.bias"].view(x.shape[1:] if each else -1) if norm.bias else x

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self._dtype).float()
