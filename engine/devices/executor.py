"""Executor: a loaded model, as the engine uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError
from ..weights.dtypes import DType
from ..weights.lora import LoraAdapter
from .batch import StepBatch, StepOutput
from .bucket_stats import BucketStats
from .limits import ExecutorLimits


class Pending(Protocol):
    """A step that was started."""

    def wait(self) -> StepOutput:
        """The step's output; call it once. Drops the GIL while it waits or computes."""
        ...


class OnWait:
    """A step that is computed when it is waited for, by devices that have nothing but the caller's processors."""

    def __init__(self, compute: Callable[[], StepOutput]) -> None:
        self.wait = compute


class DraftExecutor(Protocol):
    """A small model that drafts what the model beside it will sample. That one's executor closes it.

    Its KV cache has the blocks of the other one's first cache group, under the same numbers. Or it is the executor of a
    model with an `mtp` or `eagle3` layer, which drafts in blocks of its own.
    """

    limits: ExecutorLimits

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], min_probability: float = 0.0) -> NDArray[np.int32]:
        """Run the batch, then sample up to `counts` [S] draft tokens of each sequence, one after the other.

        Each is sampled as its sequence's row says, at its own position. Returns them, [S, most], with -1 behind the
        last one of each sequence.

        The rows of the batch are the last tokens of the sequences that want draft tokens. K and V of draft tokens are
        written behind the batch's, except for the last of each sequence, so the block tables must have room for them. A
        greedy sequence gets draft tokens as long as the model expects that all of them together are accepted with
        `min_probability`. A sequence that draws its tokens gets one more.
        Penalties count the draft tokens before. Masks are only for the first draft token, and must be written. Reports
        are left out. Drops the GIL.

        A draft layer is given only the last tokens. It drafts nothing for a sequence if it does not have what the model
        left for the token before.
        """
        ...

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """See Executor."""
        ...


class Executor(ABC):
    """A loaded model with its KV cache. All calls come from one thread, except where a method says otherwise.

    A device implements the abstract methods. The others are for what only some devices do. They do nothing here, or
    raise NotImplementedError and are called only if the device's Capabilities say that it has them.
    """

    limits: ExecutorLimits
    can_restart = False
    """Whether it computes in other processes, and can start them again when one ends: see `watch`."""

    @abstractmethod
    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile or capture all that steps need, before the first one. Calls `progress(done, all)` meanwhile."""

    @abstractmethod
    def start(self, batch: StepBatch) -> Pending:
        """Begin to run the batch: write its K and V, and sample its rows.

        One step at a time: the next begins when this one was waited for. The batch must stay as it is until then. A
        device with `async_scheduling` has taken what it needs of the batch when this returns, and may be given one step
        that `is_async` before this one is waited for. They are waited for in order.
        """

    @abstractmethod
    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]. None is copied both from and to."""

    @abstractmethod
    def close(self) -> None:
        """Free weights and cache and stop the device's threads. Calling it twice is allowed.

        Steps may have been started that are never waited for.
        """

    def use_threads(self, threads: object) -> bool:
        """Compute with these threads from now on, and let what is beside it do so; whether that can be.

        They are what `Device.threads` gives, and must be as many in as many groups. It must be idle.
        """
        return False

    def pin_caller(self) -> None:
        """Give the calling thread the processor from which steps, and what is beside them, are run."""
        return

    def yield_core(self, num_tokens: int) -> Callable[[], None] | None:
        """Leave a core to another thread of this process, which is about to pass on a step's `num_tokens` tokens.

        Returns what has to be called when that is done, from any thread, also in the middle of a step or after `close`;
        None if no core was left.
        """
        return None

    def release_scratch(self) -> None:
        """Give memory back that steps can take anew, as none is expected soon."""
        return

    @property
    def is_writing(self) -> bool:
        """Whether it still writes what makes the next load faster, which `close` would give up. From any thread."""
        return False

    def stats(self) -> BucketStats | None:
        """What was run since the warm-up; None if launches are not padded to buckets. From any thread."""
        return None

    def measure_ceilings(self, dtype: DType, seconds: float) -> dict[str, float]:
        """`copy_bytes_per_second` of the device's memory, and `<dtype>_flops` of products. It takes about `seconds`.

        Call it between steps.
        """
        raise NotImplementedError

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy the state of all recurrent layers between slots, `pairs[i] = (from, to)`, shape [N, 2], in that order.

        A sequence that begins at position 0 begins with the initial state.
        """
        raise NotImplementedError

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Make an adapter ready, which sequences name by its number (`StepBatch.adapters`).

        From any thread, also in the middle of a step. Raises DeviceError.
        """
        raise NotImplementedError

    def drop_lora(self, number: int) -> None:
        """Free an adapter that no sequence names any more."""
        raise NotImplementedError

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block over all layers, of a model with one cache group, no window and no recurrent state.

        They do not depend on how the device shares its work out: another load of the same model, on a device that
        computes the same bits, may be given them.
        """
        raise NotImplementedError

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of KV blocks that no step writes now, shape [N, block_bytes]."""
        raise NotImplementedError

    def write_blocks(self, blocks: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Put such bytes into blocks that no sequence holds, between two steps."""
        raise NotImplementedError

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, on any thread, when one of the device's processes ends; also before or between steps.

        Where they have ended, methods raise DeviceError. The executor has to be restarted before it is used again, and
        its cache is empty then.
        """
        return

    def check(self) -> None:
        """Raise DeviceError if a process has ended."""
        return

    def restart(self, failure: DeviceError) -> None:
        """End all processes, and start new ones after a pause that grows from time to time.

        Raises `failure` if that has happened too often, and LoadCancelledError after `stop_restarting`.
        """
        raise failure

    def stop_restarting(self) -> None:
        """End a restart, and let no other begin. From any thread."""
        return
