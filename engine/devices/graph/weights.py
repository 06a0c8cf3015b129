"""The weights on the device, and the two things that everything does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...models.spec import NormSpec
from ...weights.dtypes import DType
from ...weights.quantization import is_router
from ...weights.tensor import DenseTensor
from ..grouped_weights import GroupedMatrix
from .grouped import Grouped
from .operations import Matrix, Operations, RmsNorm

DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORAGE: dict[DType, torch.dtype] = {**DTYPES, "bfloat16": torch.uint16}  # numpy has no bfloat16


class Linear:
    """`x W^T`, with the bias if there is one, in the weights' dtype. `x [..., in_features]`."""

    def __init__(self, weight: Tensor | Matrix, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._weight.dtype)
        if isinstance(self._weight, Tensor):
            return functional.linear(x, self._weight, self._bias)
        y = self._weight.multiply(x)
        return y if self._bias is None else y + self._bias


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
    """All weights of a model on one device: matrices in `dtype` or in groups, vectors and routers in float32.

    They are copied one after the other, so that the host never has more than one of them beside the source. The
    device's own `operations` say how it normalizes, and which weights it keeps in another form.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, DenseTensor | GroupedMatrix]],
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._matrices: dict[str, Matrix] = {}
        self._operations = operations or Operations()
        for name, tensor in tensors:
            host = tensor if isinstance(tensor, GroupedMatrix) else _host_tensor(tensor)
            store = self._operations.store
            if store is not None and (stored := store(name, host)) is not None:
                self._matrices[name] = stored
            elif isinstance(host, GroupedMatrix):
                self._matrices[name] = Grouped(host, dtype, device)
            else:
                in_floats = host.ndim == 1 or is_router(name)
                self._tensors[name] = host.to(device, torch.float32 if in_floats else dtype)

    def __getitem__(self, name: str) -> Tensor:
        """The weight as a tensor. A matrix that is kept in another form is dequantized, and then takes more memory."""
        found = self._tensors.get(name)
        return self._matrices[name].dense() if found is None else found

    def matrix(self, name: str) -> Tensor | Matrix:
        """The matrix of that name, as it is kept."""
        return self._matrices.get(name) or self._tensors[name]

    def take(self, name: str) -> Tensor:
        """A weight that the caller keeps in another form, and nobody asks for again."""
        found = self._tensors.pop(name, None)
        return self._matrices.pop(name).dense() if found is None else found

    def take_stack(self, names: Sequence[str]) -> Tensor | Grouped:
        """Matrices of one shape that the caller keeps: as a stack of tensors, or one below the other if grouped."""
        found = [self._matrices.get(name) for name in names]
        grouped = [matrix for matrix in found if isinstance(matrix, Grouped)]
        if len(grouped) < len(names):
            return torch.stack([self.take(name) for name in names])
        for name in names:
            del self._matrices[name]
        return Grouped.stacked(grouped)

    def linear(self, name: str, bias_of: str | None = None) -> Linear:
        """The linear layer of that name, with its own bias or another layer's."""
        return Linear(self.matrix(f"{name}.weight"), self._tensors.get(f"{bias_of or name}.bias"))

    def table(self, name: str) -> Callable[[Tensor], Tensor]:
        """What looks rows up in the matrix of that name: of indices `[...] int64` it makes `[..., columns]`."""
        found = self.matrix(name)
        return found.rows if isinstance(found, Grouped) else self[name].__getitem__

    def norm(self, name: str, spec: NormSpec | None, rows: int | None = None) -> Norm:
        """The norm of that name. Of inputs `[..., rows, size]`, each row may have weights of its own."""
        found = (self._tensors.get(f"{name}.{kind}") for kind in ("weight", "bias"))
        weight, bias = (vector if vector is None or rows is None else vector.view(rows, -1) for vector in found)
        return Norm(spec, weight, bias, self._operations.rms_norm)


def _host_tensor(tensor: DenseTensor) -> Tensor:
    """A copy in memory of its own: the source's may be a read-only file, strided, or of the other byte order."""
    host = torch.empty(tensor.data.shape, dtype=_STORAGE[tensor.dtype])
    host.numpy()[...] = tensor.data
    return host.view(DTYPES[tensor.dtype])
