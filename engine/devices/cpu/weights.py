"""The way of weights from a checkpoint into the native runtime."""

from __future__ import annotations

from collections.abc import Mapping

from tidewheel import _native

from ...cancellation import Cancellation
from ...weights.finite import require_finite
from ...weights.tensor import DenseTensor, WeightSource, require_dense

_BYTES_TOGETHER = 1 << 28  # of a mapped checkpoint: looked through, then packed while they are still in memory


def set_weights(native: _native.Executor, weights: WeightSource, threads: int, cancellation: Cancellation) -> None:
    """Pack all weights with `threads` threads. Raises LoadCancelledError between two of the runtime's calls, and what
    `require_finite` raises.
    """
    # What is mapped goes in few calls: each return would wait for the interpreter's lock. Its memory is given back as
    # it is packed. What is not may be made as it is asked for, and goes at once. So there is never more of a checkpoint
    # in memory, beside the packed model, than what is being packed.
    together: dict[str, DenseTensor] = {}
    num_bytes = 0
    for name in weights:
        tensor = together[name] = require_dense(weights[name], "cpu")
        num_bytes += tensor.data.nbytes
        if num_bytes >= _BYTES_TOGETHER or not tensor.mapped:
            cancellation.check()
            _pack(native, together, threads)
            together, num_bytes = {}, 0
    _pack(native, together, threads)


def _pack(native: _native.Executor, tensors: Mapping[str, DenseTensor], threads: int) -> None:
    require_finite(list(tensors.values()), threads)
    entries = []
    for name, tensor in tensors.items():
        data, swapped = tensor.data, not tensor.data.dtype.isnative
        if swapped:
            data = data.view(data.dtype.newbyteorder())  # the same bytes; they are swapped as they are packed
        entries.append((name, data, tensor.dtype, swapped, tensor.mapped))
    native.set_weights(entries)
