"""The torch device: the readable reference. It runs a spec on paged batches with torch operations.

Numbers follow the native device: the residual stream and all that is elementwise is float32; the inputs of a matrix
product are rounded to the model's dtype and summed in float32; K and V are cached in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..errors import DeviceError
from ..models.spec import DecoderSpec
from ..weights.dtypes import STORAGE, DType, KvCacheDType
from ..weights.finite import require_finite
from ..weights.tensor import WeightSource, WeightTensor
from .base import ExecutorLimits, ExecutorOptions
from .batch import StepBatch, StepOutput
from .sampling import sample_row

if TYPE_CHECKING:
    from .torch_decoder import TorchDecoder

_BLOCK_SIZE = 16


class TorchDevice:
    """Runs on the CPU through torch, which is imported when a model is loaded."""

    name = "torch"
    isa = None

    def default_dtype(self, checkpoint: DType) -> DType:
        """What the checkpoint is stored as: torch computes with all of them."""
        return checkpoint

    def kv_bytes_per_token(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> int:
        """Bytes of KV cache that one token takes over all layers. Raises DeviceError for 8-bit types."""
        heads = sum(2 * attention.kv_size for attention in spec.attentions())
        return heads * STORAGE[_cached(kv_cache_dtype)].itemsize

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> TorchExecutor:
        """Copy the weights and allocate the cache. Raises DeviceError if torch is missing or the cache too small."""
        try:
            from .torch_decoder import TorchDecoder
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise DeviceError("the torch device needs torch: pip install 'tidewheel[torch]'") from error
        if options.quantization is not None:
            raise DeviceError("the torch device does not quantize weights: drop --quantization or take --device cpu")
        block_bytes = _BLOCK_SIZE * self.kv_bytes_per_token(spec, options.cache_dtype)
        num_blocks = options.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise DeviceError(
                f"a KV cache of {options.kv_cache_bytes} bytes is less than one block of {_BLOCK_SIZE} tokens "
                f"({block_bytes} bytes)"
            )
        limits = ExecutorLimits(_BLOCK_SIZE, num_blocks, options.max_num_seqs, options.max_num_batched_tokens)
        tensors = _read(weights, cancellation or Cancellation())
        return TorchExecutor(
            TorchDecoder(spec, tensors, options.dtype, _cached(options.cache_dtype), num_blocks, _BLOCK_SIZE), limits
        )


def _read(weights: WeightSource, cancellation: Cancellation) -> Iterator[tuple[str, WeightTensor]]:
    for name in weights:
        cancellation.check()
        tensor = weights[name]
        require_finite([tensor])
        yield name, tensor


def _cached(dtype: KvCacheDType) -> DType:
    if dtype == "fp8_e5m2" or dtype == "int8":
        raise DeviceError(
            f"the torch device caches K and V as float32, bfloat16 or float16, not {dtype}: "
            "choose one of them with --kv-cache-dtype, or --device cpu"
        )
    return dtype


class TorchExecutor:
    """A loaded model. `tokens_per_pass` is how many of a batch's tokens go through the decoder together.

    It is 1, because torch picks its kernels, their blocking and the handling of their last lanes by the number of
    rows: a token would get other last bits in other company. Alone, a token is computed with the same shapes whatever
    the batch, so that its result is the same to the bit. Raising it trades that for speed.
    """

    tokens_per_pass = 1

    def __init__(self, decoder: TorchDecoder, limits: ExecutorLimits) -> None:
        self.limits = limits
        self._decoder: TorchDecoder | None = decoder

    def step(self, batch: StepBatch) -> StepOutput:
        """Run the batch, write its K and V, and sample its rows."""
        decoder, output = self._loaded(), StepOutput.empty(batch.sampling)
        sequence = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        for start in range(0, len(batch.token_ids), self.tokens_per_pass):
            stop = min(start + self.tokens_per_pass, len(batch.token_ids))
            rows = np.flatnonzero((batch.logits_rows >= start) & (batch.logits_rows < stop))
            # Rows of one token share its logits, which are computed once.
            tokens, token_of = np.unique(batch.logits_rows[rows] - start, return_inverse=True)
            logits = decoder.forward(
                batch.token_ids[start:stop],
                batch.positions[start:stop],
                batch.block_tables[sequence[start:stop]],
                tokens,
            )
            if rows.size and batch.sampling.masks is not None:
                batch.sampling.masks.wait()
            for row, token in zip(rows.tolist(), token_of.tolist(), strict=True):
                sample_row(logits[token], batch.sampling, row, output)
            if batch.return_logits:
                if output.logits is None:
                    output.logits = np.empty((len(batch.logits_rows), logits.shape[1]), np.float32)
                output.logits[rows] = logits[token_of]
        return output

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy KV blocks, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._loaded().copy_blocks(pairs)

    def lend_core(self) -> None:
        """Does nothing: torch has threads of its own."""

    def take_back_core(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Free weights and cache. Calling it twice is allowed."""
        self._decoder = None

    def _loaded(self) -> TorchDecoder:
        if self._decoder is None:
            raise DeviceError("this executor was closed")
        return self._decoder
