"""The way of weights from a checkpoint into the native runtime."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tidewheel import _native

from ...cancellation import Cancellation
from ...weights.finite import require_finite
from ...weights.tensor import DenseTensor, QuantizedTensor, WeightSource, WeightTensor

logger = logging.getLogger(__name__)

_BYTES_TOGETHER = 1 << 28  # of a mapped checkpoint: looked through, then packed while they are still in memory


def set_weights(native: _native.Executor, weights: WeightSource, threads: int, cancellation: Cancellation) -> None:
    """Pack all weights with `threads` threads. Raises LoadCancelledError between two of the runtime's calls, and what
    `require_finite` raises.
    """
    # Mapped tensors are packed many at a time, because each return from the runtime waits for the interpreter's lock.
    # Their pages are given back to the system as they are packed. A tensor that is not mapped may have been made just
    # now, so it is packed at once. Memory thus holds the packed model and only the tensors that are being packed.
    together: dict[str, DenseTensor] = {}
    num_bytes, dequantized = 0, 0
    for name in weights:
        stored = weights[name]
        dequantized += isinstance(stored, QuantizedTensor)
        tensor = together[name] = _dense(stored)
        num_bytes += tensor.data.nbytes
        if num_bytes >= _BYTES_TOGETHER or not tensor.mapped:
            cancellation.check()
            _pack(native, together, threads)
            together, num_bytes = {}, 0
    _pack(native, together, threads)
    if dequantized:
        logger.info(
            "%d matrices of the checkpoint are quantized; the cpu device dequantizes them as they are read, so they "
            "take the memory of --dtype or --quantization, not of the file",
            dequantized,
        )


def _dense(tensor: WeightTensor) -> DenseTensor:
    if isinstance(tensor, DenseTensor):
        return tensor
    require_finite([tensor])  # so that the error names the scales
    return DenseTensor(tensor.dequantize(), "float32", origin=tensor.origin)


def _pack(native: _native.Executor, tensors: Mapping[str, DenseTensor], threads: int) -> None:
    require_finite(list(tensors.values()), threads)
    entries = []
    for name, tensor in tensors.items():
        data, swapped = tensor.data, not tensor.data.dtype.isnative
        if swapped:
            data = data.view(data.dtype.newbyteorder())  # the same bytes; they are swapped as they are packed
        entries.append((name, data, tensor.dtype, swapped, tensor.mapped))
    native.set_weights(entries)
