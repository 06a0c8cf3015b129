"""A loaded model in the native runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ...errors import DeviceError
from ...weights.dtypes import DType
from ...weights.lora import LoraAdapter
from ...weights.packed_cache import BackgroundWrite
from ..batch import StepBatch, StepOutput
from ..executor import Executor, OnWait
from ..limits import ExecutorLimits

# Worth a core to pass on: fewer tokens are, in about the time that a thread takes to sleep and to wake.
_YIELD_TOKENS = 8


class _Beside(Protocol):
    """What uses the threads of another executor: a draft model or a tower."""

    def use_threads(self, threads: object) -> bool: ...

    def release_scratch(self) -> None: ...

    @property
    def is_writing(self) -> bool: ...

    def close(self) -> None: ...


class CpuExecutor(Executor):
    """A model in the native runtime. The calling thread computes too, as worker 0."""

    def __init__(
        self,
        native: _native.Executor,
        limits: ExecutorLimits,
        write: BackgroundWrite | None = None,
        *,
        yields_cores: bool = False,
        lora_dtype: DType = "float32",
    ) -> None:
        self.limits = limits
        self._lora_dtype = lora_dtype
        self._yields_cores = yields_cores
        self._native: _native.Executor | None = native
        self._write = write
        self._pinned_thread: int | None = None
        self._beside: list[_Beside] = []

    @property
    def native(self) -> _native.Executor:
        """The runtime itself. Raises DeviceError after `close`."""
        if self._native is None:
            raise DeviceError("this executor was closed")
        return self._native

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Nothing: kernels are compiled, and threads run since the load."""

    def start(self, batch: StepBatch) -> OnWait:
        """Run the batch, write its K and V, and sample its rows, when it is waited for.

        Waiting raises ValueError for arrays that do not fit.
        """
        return OnWait(partial(self._step, batch))

    def _step(self, batch: StepBatch) -> StepOutput:
        self.pin_caller()
        output = StepOutput.empty(batch.sampling)
        self.run_into(output, batch)
        return output

    def run_into(self, output: StepOutput, batch: StepBatch, rows: NDArray[np.float32] | None = None) -> None:
        """Run the batch, and write what it gives to the arrays of `output`.

        A stage of a pipeline is given the `rows [T, row_floats]` of the stage before it, and puts its own in their
        place. Raises ValueError for arrays that do not fit.
        """
        self.native.step(
            batch,
            output.token_ids,
            output.logprobs,
            output.ranks,
            output.top_ids,
            output.top_logprobs,
            rows,
        )

    def logits(self, batch: StepBatch) -> tuple[StepOutput, NDArray[np.float32]]:
        """Run the batch, and return its output and the logits of its rows, `[R, vocab]`.

        It is for measurements, which want all of them: as log-probabilities they are sorted, which takes longer than
        to compute them with a small model. Raises ValueError for arrays that do not fit.
        """
        native = self.native
        self.pin_caller()
        output = StepOutput.empty(batch.sampling)
        logits = np.empty((len(batch.logits_rows), native.vocab_size), np.float32)
        outputs = (output.token_ids, output.logprobs, output.ranks, output.top_ids, output.top_logprobs)
        native.step(batch, *outputs, logits=logits)
        return output, logits

    def inputs(self, batch: StepBatch, names: Sequence[str]) -> list[tuple[list[str], NDArray[np.float32]]]:
        """Run the batch, and return the inputs of matrices, `[rows, K]`: a row for each token that they computed.

        Tensors that are packed into one matrix come together. Those that no token reached (experts that were not
        chosen), and matrices that are not multiplied with whole rows, are left out. Raises ValueError for a name that
        is no matrix, and for arrays that do not fit.
        """
        native = self.native
        together: dict[int, list[str]] = {}
        for name, matrix in zip(names, native.matrix_ids(names), strict=True):
            together.setdefault(matrix, []).append(name)
        native.capture_inputs([same[0] for same in together.values()])
        try:
            self._step(batch)
            found = [(same, native.take_inputs(same[0])) for same in together.values()]
        finally:
            native.capture_inputs([])
        return [(same, rows) for same, rows in found if len(rows)]

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], min_probability: float = 0.0) -> NDArray[np.int32]:
        """Run the batch, then one draft token after the other: see DraftExecutor.

        Raises ValueError for arrays that do not fit.
        """
        native = self.native
        self.pin_caller()
        tokens = np.empty((len(counts), int(counts.max(initial=0))), np.int32)
        native.draft(batch, counts, min_probability, tokens)
        return tokens

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self.native.copy_blocks(np.ascontiguousarray(pairs, np.int32), group)

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, over all layers."""
        return self.native.block_bytes

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of KV blocks, shape [N, block_bytes]."""
        native = self.native
        data = np.empty((len(blocks), native.block_bytes), np.uint8)
        native.read_blocks(blocks, data)
        return data

    def write_blocks(self, blocks: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Put such bytes into KV blocks."""
        self.native.write_blocks(blocks, data)

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy recurrent state between slots, `pairs[i] = (from, to)`, shape [N, 2], one after the other."""
        self.native.copy_states(np.ascontiguousarray(pairs, np.int32))

    def release_scratch(self) -> None:
        """Give the memory of activations back to the system, until the next step."""
        self.native.release_scratch()
        for beside in self._beside:
            beside.release_scratch()

    @property
    def is_writing(self) -> bool:
        """See Executor. Its packed weights, and those of what is beside it."""
        own = self._write is not None and self._write.is_running
        return own or any(beside.is_writing for beside in self._beside)

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Pack an adapter, from any thread. Raises DeviceError for one that the kernels cannot run."""
        updates = [(f"{u.name}.weight", u.first_output, u.a, u.b, u.bias, u.scale, u.shift) for u in adapter.updates]
        matrices = {name: (_in_order(matrix.data), matrix.dtype) for name, matrix in adapter.matrices.items()}
        native = self.native
        try:
            packed = native.pack_adapter(self._lora_dtype, updates, **matrices, rope_factor=adapter.rope_factor)
            native.set_adapter(number, packed)
        except ValueError as error:
            raise DeviceError(f"the cpu device cannot load this adapter: {error}") from error
        except MemoryError as error:
            raise DeviceError("not enough memory for the adapter; lower --max-cpu-loras") from error

    def drop_lora(self, number: int) -> None:
        """Free an adapter."""
        self.native.set_adapter(number, None)

    def use_threads(self, threads: object) -> bool:
        """See Executor."""
        if not isinstance(threads, _native.ThreadPool) or not self.native.use_threads(threads):
            return False
        for beside in self._beside:
            beside.use_threads(threads)
        return True

    def pin_caller(self) -> None:
        """See Executor. It is worker 0's. The main thread is left as it is."""
        # It is the program's own, and what it starts would inherit its place.
        thread = threading.get_ident()
        if thread != self._pinned_thread:
            self._pinned_thread = thread
            if threading.current_thread() is not threading.main_thread():
                self.native.pin_caller()

    def yield_core(self, num_tokens: int) -> Callable[[], None] | None:
        """Leave the last worker's processor to the thread that passes many tokens on, until it is done."""
        if not self._yields_cores or num_tokens < _YIELD_TOKENS:
            return None
        threads = self.native.threads  # other executors may have them too, so they get it back even after `close`
        threads.yield_core()
        return threads.reclaim_core

    def close_with(self, beside: _Beside) -> None:
        """Close a draft model or a tower with this one."""
        self._beside.append(beside)

    def close(self) -> None:
        """Free weights and cache and join the threads. Packed weights that are not written yet stay unwritten."""
        if self._write is not None:
            self._write.cancel()
        self._native = None
        for beside in self._beside:
            beside.close()


def _in_order(data: NDArray[Any]) -> NDArray[Any]:
    """Contiguous, and its bytes in this machine's order."""
    return np.ascontiguousarray(data, data.dtype.newbyteorder("="))
