"""An executor whose steps are watched: what was compiled, what ran on the CPU, and a trace of when they ran."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...weights.dtypes import DType
from ..batch import StepBatch, StepOutput
from ..bucket_stats import BucketStats
from ..executor import Executor, OnWait, Pending
from .hpu_options import HpuOptions

logger = logging.getLogger(__name__)


class WatchedExecutor(Executor):
    """An executor, and what the options want to know of its steps, which run one after the other for that.

    Raises DeviceError if the trace cannot be written.
    """

    def __init__(self, executor: Executor, options: HpuOptions) -> None:
        self.limits = replace(executor.limits, async_scheduling=False)
        self._executor, self._metrics = executor, options.metrics
        self._trace = _Trace() if options.hpu_profiler_enabled else None

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """As the executor does; it compiles, and that is no news."""
        self._executor.warm_up(progress)

    def start(self, batch: StepBatch) -> Pending:
        """Begin the step, and to watch it."""
        watch = ExitStack()
        counts = {name: watch.enter_context(_local_metric(name)) for name in self._metrics}
        text, started = _describe(batch), time.perf_counter()
        try:
            pending = self._executor.start(batch)
        except BaseException:
            watch.close()
            raise

        def wait() -> StepOutput:
            with watch:
                output = pending.wait()
            if self._trace is not None:
                self._trace.write(text, started)
            for name, (word, always) in self._metrics.items():
                stats = counts[name].stats()
                if always or stats[0][1] > 0:
                    logger.warning("%s: %s, %s", word, stats, text)
            return output

        return OnWait(wait)

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._executor.copy_blocks(pairs, group)

    def stats(self) -> BucketStats | None:
        """As the executor does."""
        return self._executor.stats()

    def measure_ceilings(self, dtype: DType, seconds: float) -> dict[str, float]:
        """As the executor does."""
        return self._executor.measure_ceilings(dtype, seconds)

    def close(self) -> None:
        """Close the executor, and the trace."""
        self._executor.close()
        if self._trace is not None:
            self._trace.close()


class _Trace:
    """Chrome's trace events (https://perfetto.dev/docs/getting-started/other-formats), one for each step."""

    def __init__(self) -> None:
        path = Path(f"server_events_{os.getpid()}.json").absolute()
        try:
            self._file = path.open("w")
        except OSError as error:
            raise DeviceError(f"the trace of --hpu-profiler-enabled cannot be written: {error}") from error
        self._file.write("[")
        logger.info("A trace of all steps is written to %s", path)

    def write(self, name: str, started: float) -> None:
        """A step that began at `started`, in seconds of perf_counter, and has just ended."""
        event = {
            "name": name,
            "ph": "X",
            "ts": started * 1e6,
            "dur": (time.perf_counter() - started) * 1e6,
            "pid": os.getpid(),
            "tid": 0,
        }
        self._file.write(("," if self._file.tell() > 1 else "") + "\n" + json.dumps(event))
        self._file.flush()

    def close(self) -> None:
        """End the file. Calling it twice is allowed."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()


def _local_metric(name: str) -> Any:
    from habana_frameworks.torch.hpu.metrics import metric_localcontext

    return metric_localcontext(name)


def _describe(batch: StepBatch) -> str:
    num_tokens, num_seqs = len(batch.token_ids), len(batch.context_len)
    phase = "decode" if num_tokens == num_seqs else "prompt"
    longest = int(batch.context_len.max(initial=0))
    return f"{phase} num_seqs:{num_seqs} num_tokens:{num_tokens} max_context_len:{longest}"
