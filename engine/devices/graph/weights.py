"""The weights on the device, and the two things that everything does with them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from ...models.spec import NormSpec
from ...weights.dtypes import DType
from ...weights.tensor import DenseTensor, WeightTensor
from .operations import RmsNorm

logger = logging.getLogger(__name__)

DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORAGE: dict[DType, torch.dtype] = {**DTYPES, "bfloat16": torch.uint16}  # numpy has no bfloat16


class Linear:
    """`x W^T`, with the bias if there is one, in the weights' dtype. `x [..., in_features]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self._weight.dtype), self._weight, self._bias)


class Norm:
    """`x` normalized over its last dimension, in float32, or as it is where there is no norm."""

    def __init__(
        self, spec: NormSpec | None, weight: Tensor | None, bias: Tensor | None, rms_norm: RmsNorm | None = None
    ) -> None:
        self._spec, self._bias = spec, bias
        self._weight = 1.0 + weight if spec and spec.unit_offset and weight is not None else weight
        self._rms_norm = rms_norm if spec and spec.kind == "rms" and bias is None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._spec is None:
            return x
        x = x.float()
        if self._rms_norm is not None and self._weight is not None and self._weight.ndim == 1:
            return self._rms_norm(x, self._weight, self._spec.eps)
        if self._spec.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._spec.eps)
        x = x if self._weight is None else x * self._weight
        return x if self._bias is None else x + self._bias


class Weights:
    """All weights of a model on one device: matrices in `dtype`, vectors in float32.

    They are copied one after the other, so that the host never has more than one of them beside the source. `rms_norm`
    is the device's own, if it has one.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, WeightTensor]],
        dtype: torch.dtype,
        device: torch.device,
        rms_norm: RmsNorm | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rms_norm = rms_norm
        dequantized = False
        for name, tensor in tensors:
            if not isinstance(tensor, DenseTensor) and not dequantized:
                dequantized = True
                logger.warning(
                    "%s is quantized: such weights are dequantized while they are loaded, and need as much memory as "
                    "in %s",
                    tensor.origin,
                    str(dtype).removeprefix("torch."),
                )
            host = _host_tensor(tensor)
            self._tensors[name] = host.to(device, dtype if host.ndim > 1 else torch.float32)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def linear(self, name: str, bias_of: str | None = None) -> Linear:
        """The linear layer of that name, with its own bias or another layer's."""
        return Linear(self[f"{name}.weight"], self._tensors.get(f"{bias_of or name}.bias"))

    def norm(self, name: str, spec: NormSpec | None, rows: int | None = None) -> Norm:
        """The norm of that name. Of inputs `[..., rows, size]`, each row may have weights of its own."""
        found = (self._tensors.get(f"{name}.{kind}") for kind in ("weight", "bias"))
        weight, bias = (vector if vector is None or rows is None else vector.view(rows, -1) for vector in found)
        return Norm(spec, weight, bias, self._rms_norm)


def _host_tensor(tensor: WeightTensor) -> Tensor:
    """A copy in memory of its own: the source's may be a read-only file, strided, or of the other byte order."""
    if not isinstance(tensor, DenseTensor):
        return torch.from_numpy(tensor.dequantize())
    host = torch.empty(tensor.data.shape, dtype=_STORAGE[tensor.dtype])
    host.numpy()[...] = tensor.data
    return host.view(DTYPES[tensor.dtype])
