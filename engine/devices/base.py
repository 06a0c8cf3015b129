"""The contract between the engine and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..models.spec import DecoderSpec
from ..weights.dtypes import DType, KvCacheDType
from ..weights.quantization import Quantization
from ..weights.tensor import WeightSource
from .batch import StepBatch, StepOutput


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """What a device is asked to provide. `kv_cache_bytes` bounds the KV cache; `max_model_len` is in tokens.

    `dtype` is the weights', `kv_cache_dtype` that of the cached K and V.
    """

    dtype: DType
    kv_cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads_bind: str = "auto"
    kv_cache_dtype: KvCacheDType | None = None  # None: as `dtype`
    quantization: Quantization | None = None  # None: all weights are of `dtype`
    cache_dir: str | None = None  # a folder for packed weights; None: none are kept

    @property
    def cache_dtype(self) -> KvCacheDType:
        """What K and V are cached as."""
        return self.kv_cache_dtype or self.dtype


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What the scheduler must obey.

    `mixed_steps`: prefill chunks and decodes may share a step. `chunked_prefill`: a prompt may be split over steps.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    mixed_steps: bool = True
    chunked_prefill: bool = True


class Executor(Protocol):
    """A loaded model with its KV cache. All calls but `take_back_core` come from one thread."""

    limits: ExecutorLimits

    def step(self, batch: StepBatch) -> StepOutput:
        """Run the batch, write its K and V, and sample its rows. Drops the GIL while it works."""
        ...

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy KV blocks, `pairs[i] = (from, to)`, shape [N, 2]. No block is copied both from and to."""
        ...

    def lend_core(self) -> None:
        """Leave a processor to the caller's other threads until `take_back_core` was called as often.

        Steps go on meanwhile, with the rest of the threads. Does nothing where the device has none to spare.
        """
        ...

    def take_back_core(self) -> None:
        """End a loan, from any thread, also in the middle of a step or after `close`."""
        ...

    def close(self) -> None:
        """Free weights and cache and stop the device's threads. Calling it twice is allowed."""
        ...


class Device(Protocol):
    """Something that can load a spec. `name` is what `--device` calls it."""

    name: str

    @property
    def isa(self) -> str | None:
        """The instruction set level in use, where there is a choice of them."""
        ...

    def default_dtype(self, checkpoint: DType) -> DType:
        """What `--dtype auto` means for a checkpoint stored as `checkpoint`."""
        ...

    def kv_bytes_per_token(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> int:
        """Bytes of KV cache that one token takes over all layers. Raises DeviceError for a type it cannot cache."""
        ...

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Pack the weights and allocate the cache, from any thread.

        Raises DeviceError, naming what is not supported, and LoadCancelledError soon after it was cancelled.
        """
        ...
