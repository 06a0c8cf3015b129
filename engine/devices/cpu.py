"""The CPU device: lowers a DecoderSpec to the native runtime's plan and runs it with the kernels of this processor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ..cancellation import Cancellation, LoadCancelledError
from ..errors import DeviceError
from ..machine.cgroup import cpu_quota
from ..machine.cpu_list import cpu_list
from ..machine.huge_pages import huge_pages
from ..models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, tensor_shapes
from ..weights.dtypes import DType, KvCacheDType
from ..weights.finite import require_finite
from ..weights.packed_cache import BackgroundWrite, PackedCache
from ..weights.quantization import Quantization
from ..weights.tensor import DenseTensor, WeightSource, require_dense
from .base import ExecutorLimits, ExecutorOptions
from .batch import StepBatch, StepOutput
from .cpu_groups import choose_groups, group_list, spanning_groups

logger = logging.getLogger(__name__)

_BYTES_TOGETHER = 1 << 28  # of a mapped checkpoint: looked through, then packed while they are still in memory


def thread_groups(isa: str, threads_bind: str) -> list[list[int]]:
    """The processors to compute on, by group. Says what was chosen. Raises DeviceError for what cannot be used."""
    topology, quota = _native.topology(), cpu_quota()
    groups = choose_groups(threads_bind, topology, quota)
    for group in spanning_groups(groups, topology):
        logger.warning(
            "CPUs %s are of several NUMA nodes, which read each other's memory as one group of threads; "
            "--threads-bind auto makes a group of each node",
            cpu_list(group),
        )
    count = sum(map(len, groups))
    threads = "1 thread" if count == 1 else f"{count} threads"
    limit = "" if quota is None else f"; the control group allows {quota:g} CPUs' worth of time"
    logger.info("Computing with %s kernels in %s on CPUs %s%s", isa, threads, group_list(groups), limit)
    return groups


def _report_memory() -> None:
    pages = huge_pages()
    said = "huge pages where the kernel has any" if pages.on_request else "small pages"
    mode = pages.transparent or "not supported"
    logger.info("Weights and KV cache lie in %s (transparent huge pages: %s)", said, mode)


def _norm(norm: NormSpec) -> _native.NormConfig:
    return _native.NormConfig(norm.kind == "layer", norm.eps, norm.bias)


def _layer(spec: LayerSpec) -> _native.LayerConfig:
    layer = _native.LayerConfig()
    first, second = spec
    attention, mlp = first.mixer, second.mixer
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MlpSpec)
    norm = first.norm or first.sum_norm
    assert norm is not None
    layer.num_heads, layer.num_kv_heads, layer.head_dim = (
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
    )
    layer.scale = attention.scale
    layer.qkv_bias, layer.out_bias = attention.qkv_bias, attention.out_bias
    if attention.qk_norm:
        if attention.qk_norm.kind != "rms" or attention.qk_norm.bias:
            raise DeviceError("the cpu device normalizes queries and keys by RMS without bias only")
        layer.qk_norm_eps = attention.qk_norm.eps
    if attention.rope:
        layer.inv_freq = list(attention.rope.inv_freq)
        layer.rope_factor = attention.rope.attention_factor
    layer.sliding_window = attention.sliding_window or 0
    layer.softcap = attention.softcap or 0.0
    layer.alibi_slopes = list(attention.alibi_slopes or ())
    layer.intermediate_size, layer.activation = mlp.intermediate_size, mlp.activation
    layer.gated, layer.mlp_bias = mlp.gated, mlp.bias
    layer.norm, layer.post_norm = _norm(norm), first.norm is None
    return layer


def _model(spec: DecoderSpec, max_positions: int) -> _native.ModelConfig:
    model = _native.ModelConfig()
    model.vocab_size, model.hidden_size, model.max_positions = spec.vocab_size, spec.hidden_size, max_positions
    model.embedding_size = spec.embedding.size
    model.num_positions, model.position_offset = spec.embedding.num_positions, spec.embedding.position_offset
    model.tied_head = spec.head.tied
    model.final_norm = _norm(spec.final_norm) if spec.final_norm else None
    model.layers = [_layer(layer) for layer in spec.layers]
    return model


def _quantization(quantization: Quantization | None) -> tuple[str, int, bool]:
    if quantization is None:
        return "none", 0, False
    return quantization.method, quantization.group_size, quantization.zero_points


def _set_weights(native: _native.Executor, weights: WeightSource, threads: int, cancellation: Cancellation) -> None:
    # What is mapped goes in few calls: each return would wait for the interpreter's lock. Its memory is given back as
    # it is packed. What is not may be made as it is asked for, and goes at once. So there is never more of a checkpoint
    # in memory, beside the packed model, than what is being packed.
    together: dict[str, DenseTensor] = {}
    num_bytes = 0
    for name in weights:
        tensor = together[name] = require_dense(weights[name], CpuDevice.name)
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


class CpuDevice:
    """Native kernels. `isa` names an instruction set level to use instead of the best one."""

    name = "cpu"

    def __init__(self, isa: str = "auto") -> None:
        try:
            self.isa = _native.chosen_isa_level(isa)
        except ValueError as error:
            raise DeviceError(str(error)) from error

    def default_dtype(self, checkpoint: DType) -> DType:
        """What the checkpoint is stored as: every level computes with all three."""
        return checkpoint

    def kv_bytes_per_token(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> int:
        """Bytes of KV cache that one token takes over all layers, padding and int8's scales included."""
        block = sum(
            _native.kv_bytes_per_block(attention.num_kv_heads, attention.head_dim, kv_cache_dtype)
            for attention in spec.attentions()
        )
        return block // _native.block_tokens()

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> CpuExecutor:
        """Pack the weights, or take them packed from `cache_dir`; reserve the KV cache, whose pages appear with use."""
        block_bytes = self.kv_bytes_per_token(spec, options.cache_dtype) * _native.block_tokens()
        num_blocks = options.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise DeviceError(
                f"a KV cache of {options.kv_cache_bytes} bytes holds no block of {block_bytes} bytes; "
                "raise --kv-cache-space"
            )
        groups = thread_groups(self.isa, options.threads_bind)
        _report_memory()
        limits = ExecutorLimits(
            _native.block_tokens(), num_blocks, options.max_num_seqs, options.max_num_batched_tokens
        )
        try:
            native = _native.Executor(
                _model(spec, options.max_model_len),
                self.isa,
                options.dtype,
                *_quantization(options.quantization),
                options.cache_dtype,
                num_blocks,
                options.max_num_seqs,
                options.max_num_batched_tokens,
                groups,
            )
            cache = self._packed_cache(spec, weights, options)
            cancellation = cancellation or Cancellation()
            with cancellation.calling(native.stop_loading):
                cached = cache is not None and cache.read(native)
                if not cached:
                    _set_weights(native, weights, sum(map(len, groups)), cancellation)
            native.check_complete()
        except _native.StoppedError as error:
            raise LoadCancelledError from error
        except ValueError as error:
            raise DeviceError(f"the cpu device cannot load this model: {error}") from error
        except MemoryError as error:
            raise DeviceError("not enough memory for the weights and the KV cache; lower --kv-cache-space") from error
        write = BackgroundWrite(cache, native) if cache is not None and not cached else None
        # Else the event loop has a processor without taking one from a worker.
        on_all = sum(map(len, groups)) == len(_native.topology()["processors"])
        return CpuExecutor(native, limits, spec.vocab_size, write, lends_cores=on_all)

    def _packed_cache(self, spec: DecoderSpec, weights: WeightSource, options: ExecutorOptions) -> PackedCache | None:
        if options.cache_dir is None or weights.identity is None:
            return None
        formats = (options.dtype, *_quantization(options.quantization))
        shapes = tensor_shapes(spec)
        return PackedCache(options.cache_dir, (_native.packed_version(), self.isa, *formats, shapes, weights.identity))


class CpuExecutor:
    """A model in the native runtime. The calling thread computes too, as worker 0."""

    def __init__(
        self,
        native: _native.Executor,
        limits: ExecutorLimits,
        vocab_size: int,
        write: BackgroundWrite | None = None,
        *,
        lends_cores: bool = False,
    ) -> None:
        self.limits = limits
        self._lends_cores = lends_cores
        self._native: _native.Executor | None = native
        self._vocab_size = vocab_size
        self._write = write
        self._pinned_thread: int | None = None

    @property
    def native(self) -> _native.Executor:
        """The runtime itself. Raises DeviceError after `close`."""
        if self._native is None:
            raise DeviceError("this executor was closed")
        return self._native

    def step(self, batch: StepBatch) -> StepOutput:
        """Run the batch, write its K and V, and sample its rows. Raises ValueError for arrays that do not fit."""
        native = self.native
        self._pin_caller(native)
        output = StepOutput.empty(batch.sampling)
        if batch.return_logits:
            output.logits = np.empty((len(batch.logits_rows), self._vocab_size), np.float32)
        native.step(
            batch,
            output.token_ids,
            output.logprobs,
            output.ranks,
            output.top_ids,
            output.top_logprobs,
            output.logits,
        )
        return output

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy KV blocks, `pairs[i] = (from, to)`, shape [N, 2]."""
        self.native.copy_blocks(np.ascontiguousarray(pairs, np.int32))

    def lend_core(self) -> None:
        """Leave the last worker's processor to other threads until `take_back_core` was called as often."""
        if self._lends_cores:
            self.native.lend_core()

    def take_back_core(self) -> None:
        """End a loan, from any thread."""
        native = self._native
        if self._lends_cores and native is not None:
            native.take_back_core()

    def close(self) -> None:
        """Free weights and cache and join the threads. Packed weights that are not written yet stay unwritten."""
        if self._write is not None:
            self._write.cancel()
        self._native = None

    def _pin_caller(self, native: _native.Executor) -> None:
        # The main thread is the program's own, and what it starts would inherit its place: it stays free.
        thread = threading.get_ident()
        if thread != self._pinned_thread:
            self._pinned_thread = thread
            if threading.current_thread() is not threading.main_thread():
                native.pin_caller()
