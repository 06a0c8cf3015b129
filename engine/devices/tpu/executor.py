"""Runs batches: pads them, passes them to compiled programs, and fetches their tokens."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...weights.dtypes import DType
from ..batch import SamplingBatch, StepBatch
from ..bucket_stats import BucketStats, BucketUse
from ..bucketing import Bucket
from ..executor import Executor
from ..limits import ExecutorLimits
from .buckets import smallest_holding
from .ceilings import measure_ceilings
from .inputs import row_inputs, step_inputs
from .mesh import replicated
from .pending import Rows, TpuPending
from .programs import COPIED_PAIRS, Programs

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What lies on the chips: weights, pages of K and V, and where a step leaves its hidden states."""

    params: dict[str, jax.Array]
    pages: list[jax.Array]
    hidden: jax.Array


class TpuExecutor(Executor):
    """A loaded model. Steps are padded to one of `token_sizes`, rows to one of `row_sizes`, both ascending.

    A size that was not compiled by `warm_up` is compiled by the first step that needs it, which is logged;
    `late_compilations` counts those.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        programs: Programs,
        loaded: Loaded,
        token_sizes: tuple[int, ...],
        row_sizes: tuple[int, ...],
    ) -> None:
        self.limits = limits
        self.late_compilations = 0
        self._programs, self._loaded = programs, loaded
        self._token_sizes, self._row_sizes = token_sizes, row_sizes
        self._compiled: dict[tuple[str, int], Any] = {}
        windows = [group.window for group in limits.groups]
        page_windows = programs.decoder.page_windows
        self._layers_of = [[i for i, own in enumerate(page_windows) if own == window] for window in windows]
        self._sampled = self._on_device(np.zeros(row_sizes[-1], np.int32))
        self._last: TpuPending | None = None
        self._num_steps: Counter[int] = Counter()
        self._num_tokens: Counter[int] = Counter()
        self._closed = False

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile every program, the largest first, and run it once on padding."""
        sizes = [("step", size) for size in reversed(self._token_sizes)]
        sizes += [("head", size) for size in reversed(self._row_sizes)]
        sizes += [("copy", group) for group in range(len(self.limits.groups))]
        for done, (kind, size) in enumerate(sizes, 1):
            started = time.perf_counter()
            self._compile(kind, size)
            self._run_on_padding(kind, size)
            seconds = time.perf_counter() - started
            logger.info("[Warmup][%d/%d] %s in %.2f s", done, len(sizes), _words(kind, size), seconds)
            progress(done, len(sizes))

    def start(self, batch: StepBatch) -> TpuPending:
        """Give the batch to the device: its K and V are written, and its rows sampled, while the caller goes on.

        Raises DeviceError for media.
        """
        batch.refuse_media("tpu")
        if batch.is_async and self._last is not None and self._last.samples_on_host:
            batch = replace(batch, token_ids=np.maximum(self._last.result().token_ids, 0), is_async=False)
        num_tokens = len(batch.token_ids)
        size = smallest_holding(self._token_sizes, num_tokens)
        self._num_steps[size] += 1
        self._num_tokens[size] += num_tokens
        self._run_step(batch, size)
        on_host = batch.sampling.asks_for_more()
        rows = []
        for host in (False, True):
            chosen = np.flatnonzero(on_host == host)
            most = self._row_sizes[-1]
            rows += [self._run_head(batch, chosen[i : i + most], host) for i in range(0, len(chosen), most)]
        if rows:
            self._sampled = rows[0].token_ids
        self._last = TpuPending(batch.sampling, rows)
        return self._last

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV pages of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._open()
        for start in range(0, len(pairs), COPIED_PAIRS):
            self._copy(pairs[start : start + COPIED_PAIRS], group)

    def stats(self) -> BucketStats:
        """What was run since the warm-up. A step counts as one row of tokens, of all sequences together."""
        width = self._programs.width
        uses = [
            BucketUse("step", Bucket(1, size, width), num_steps, self._num_tokens[size])
            for size, num_steps in sorted(self._num_steps.items())
        ]
        return BucketStats(tuple(uses), num_outside=0, num_compilations=self.late_compilations)

    def measure_ceilings(self, dtype: DType, seconds: float) -> dict[str, float]:
        """The most that the chips can do, see `ceilings.py`. Call it between steps."""
        return measure_ceilings(self._programs.mesh, dtype, seconds)

    def close(self) -> None:
        """Free weights and cache. Calling it twice is allowed."""
        if not self._closed:
            for array in jax.tree.leaves(self._loaded):
                array.delete()
            self._compiled.clear()
            self._closed = True

    def _run_step(self, batch: StepBatch, size: int) -> None:
        padding = [group.padding_block for group in self.limits.groups]
        inputs = step_inputs(batch, size, self._num_seqs(size), self._programs.width, padding, self.limits.block_size)
        program, (params, pages, hidden) = self._program("step", size), self._open()
        self._loaded = Loaded(params, *program(params, pages, hidden, self._sampled, self._on_device(inputs)))

    def _run_head(self, batch: StepBatch, rows: NDArray[np.intp], on_host: bool) -> Rows:
        size = smallest_holding(self._row_sizes, len(rows))
        inputs = self._on_device(row_inputs(batch, rows, size))
        token_ids, logits = self._program("head", size)(self._loaded.params, self._loaded.hidden, inputs)
        (logits if on_host else token_ids).copy_to_host_async()
        return Rows(rows, token_ids, logits if on_host else None)

    def _copy(self, pairs: NDArray[np.int32], group: int) -> None:
        padded = np.full((COPIED_PAIRS, 2), self.limits.groups[group].padding_block, np.int32)
        padded[: len(pairs)] = pairs
        pages, layers = self._open().pages, self._layers_of[group]
        copied = self._program("copy", group)([pages[layer] for layer in layers], self._on_device(padded))
        for layer, page in zip(layers, copied, strict=True):
            pages[layer] = page

    def _on_device(self, inputs: Any) -> Any:
        return jax.device_put(inputs, replicated(self._programs.mesh))

    def _num_seqs(self, num_tokens: int) -> int:
        """No step has more sequences than tokens."""
        return min(num_tokens, self.limits.max_num_seqs)

    def _open(self) -> Loaded:
        if self._closed:
            raise DeviceError("this executor was closed")
        return self._loaded

    def _program(self, kind: str, size: int) -> Any:
        if (kind, size) not in self._compiled:
            self._open()
            self.late_compilations += 1
            logger.warning("Compiling %s while serving, because it was not warmed up", _words(kind, size))
            self._compile(kind, size)
        return self._compiled[kind, size]

    def _compile(self, kind: str, size: int) -> None:
        if kind == "step":
            program = self._programs.step(size, self._num_seqs(size))
        elif kind == "head":
            program = self._programs.head(size)
        else:
            program = self._programs.copy(self._layers_of[size])
        self._compiled[kind, size] = program.compile()

    def _run_on_padding(self, kind: str, size: int) -> None:
        padding = _padding_batch([group.padding_block for group in self.limits.groups])
        if kind == "step":
            self._run_step(padding, size)
        elif kind == "head":
            jax.block_until_ready(self._run_head(padding, np.zeros(size, np.intp), False).token_ids)
        else:
            self._copy(np.empty((0, 2), np.int32), size)
        jax.block_until_ready(self._loaded.pages)


def _padding_batch(padding: list[int]) -> StepBatch:
    """A sequence of one token, in the pages of padding, and its row."""
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    tables = tuple(np.full((1, 1), page, np.int32) for page in padding)
    return StepBatch(
        token_ids=zero,
        positions=zero,
        query_start=np.array([0, 1], np.int32),
        context_len=one,
        block_tables=tables[0],
        logits_rows=zero,
        sampling=SamplingBatch.greedy(one),
        window_tables=tables[1:],
    )


def _words(kind: str, size: int) -> str:
    if kind == "step":
        return f"a step of {size} tokens"
    return f"the head for {size} rows" if kind == "head" else f"the copying of KV pages in cache group {size}"
