"""Batches through a loaded decoder whose launches have fixed sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DeviceError
from ...weights.dtypes import DType
from ..base import ExecutorLimits, OnWait
from ..batch import SamplingBatch, StepBatch, StepOutput
from ..bucket_stats import BucketStats
from ..bucketing import Bucket, BucketPlan
from ..sampling import philox_uniform, sample_row
from .adapter import Adapter
from .ceilings import measure_ceilings
from .decoder import GraphDecoder
from .launches import Head, Launches
from .memory import MemoryPlan
from .options import GraphOptions
from .splitting import Splitter
from .staging import HostMemory, pack
from .warm_up import Phase, warm_up

logger = logging.getLogger(__name__)

_MAXIMA: dict[Phase, str] = {
    "prompt": "--prompt-bs-bucket-max or --prompt-seq-bucket-max",
    "decode": "--decode-bs-bucket-max or --decode-block-bucket-max (--decode-seq-bucket-max)",
}


class GraphExecutor:
    """A loaded model. A step is some launches of the layers, and then some of the head for its rows.

    Tokens are sampled on the device. The rows that ask for more (penalties, bias, masks, log-probabilities, logits) get
    theirs from the reference sampler on the host.
    """

    def __init__(
        self,
        adapter: Adapter,
        decoder: GraphDecoder,
        limits: ExecutorLimits,
        plan: BucketPlan,
        memory: MemoryPlan | None,
        options: GraphOptions,
    ) -> None:
        self.limits = limits
        self._adapter, self._plan, self._memory, self._options = adapter, plan, memory, options
        self._splitter = Splitter(plan, limits.block_size)
        self._spare_row = len(decoder.hidden) - 1
        self._host_tokens = HostMemory(torch.int32, adapter.device)
        self._host_logits = HostMemory(torch.float32, adapter.device)
        self._vocab_size = decoder.vocab_size
        self._warned = False
        buckets = [*plan.prompts, *plan.contexts, *plan.decodes]
        padding = [group.padding_block for group in limits.groups]
        self._launches: Launches | None = Launches(
            adapter, decoder, buckets, padding, limits.block_size, limits.max_num_seqs
        )

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile all sizes, and capture their graphs, unless the options say otherwise."""
        self._adapter.enter()
        launches = self._loaded()
        if not self._options.skip_warmup:
            launches.warm_up_small(self._options.captures and self._adapter.captures)
        warm_up(launches, self._plan, self._memory, self._options, progress, captures=self._adapter.captures)
        launches.finish_warm_up()

    def start(self, batch: StepBatch) -> OnWait:
        """Ask the device for the step, and for copies of what it gives."""
        self._adapter.enter()
        launches = self._loaded()
        launches.clear()
        self._host_tokens.clear()
        self._host_logits.clear()
        # Rows of one token share its hidden state.
        wanted, row_of = np.unique(batch.logits_rows, return_inverse=True)
        token_rows = np.full(len(batch.token_ids), self._spare_row, np.int32)
        token_rows[wanted] = np.arange(len(wanted))
        self._run_layers(launches, batch, token_rows)
        sampling = batch.sampling
        is_asking = np.full(len(row_of), True) if batch.return_logits else _asks_for_more(sampling)
        tokens = self._sample(launches, np.flatnonzero(~is_asking), row_of.astype(np.int32), sampling)
        logits = self._fetch_logits(launches, np.flatnonzero(is_asking), row_of.astype(np.int32))
        return OnWait(lambda: self._finish(batch, tokens, logits))

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._adapter.enter()
        launches = self._loaded()
        launches.clear()
        launches.copy_blocks(pairs, group)
        self._adapter.synchronize()  # `clear` gives the host memory of the copies to the next step

    def hand_over(self, num_tokens: int) -> None:
        """Nothing: torch has threads of its own."""

    def close(self) -> None:
        """Free weights, cache and graphs. Calling it twice is allowed."""
        self._launches = None

    def stats(self) -> BucketStats:
        """What was run since the warm-up, by bucket."""
        return self._loaded().stats()

    def measure_ceilings(self, dtype: DType, seconds: float) -> dict[str, float]:
        """What the device can do at most, see `ceilings.py`. Call it between steps."""
        self._adapter.enter()
        return measure_ceilings(self._adapter, dtype, seconds)

    def _run_layers(self, launches: Launches, batch: StepBatch, token_rows: NDArray[np.int32]) -> None:
        padding = [group.padding_block for group in self.limits.groups]
        for phase, bucket, sequences, is_planned in self._splitter.split(batch):
            packed = pack(batch, sequences, bucket, token_rows, padding, self.limits.block_size, self._spare_row)
            if is_planned:
                num_tokens = np.diff(batch.query_start)[sequences].sum()
                launches.body(phase, bucket, packed, int(num_tokens))
                continue
            self._warn(phase, bucket)
            launches.body_outside(bucket, packed)

    def _warn(self, phase: Phase, bucket: Bucket) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "A %s of %d sequences, %d tokens and %d KV blocks each is larger than all buckets: it runs unpadded "
                "and slowly, and so do others like it. Raise %s. This is logged once.",
                phase,
                *bucket,
                _MAXIMA[phase],
            )

    def _sample(
        self, launches: Launches, rows: NDArray[np.intp], row_of: NDArray[np.int32], sampling: SamplingBatch
    ) -> list[tuple[NDArray[np.intp], Tensor]]:
        """The tokens of rows that are sampled on the device, in host memory once that is done."""
        results = []
        head: Head = "greedy" if (sampling.temperature[rows] == 0).all() else "sampled"
        for some in _pieces(rows, launches.most_rows[head]):
            launches.head(head, row_of[some], None if head == "greedy" else _parameters(sampling, some))
            host = self._host_tokens.take(len(some))
            host.copy_(launches.tokens[: len(some)], non_blocking=True)
            results.append((some, host))
        return results

    def _fetch_logits(
        self, launches: Launches, rows: NDArray[np.intp], row_of: NDArray[np.int32]
    ) -> list[tuple[NDArray[np.intp], Tensor]]:
        results = []
        for some in _pieces(rows, launches.most_rows["logits"]):
            launches.head("logits", row_of[some])
            logits = launches.logits[: len(some)]
            host = self._host_logits.take(logits.numel()).view(logits.shape)
            host.copy_(logits, non_blocking=True)
            results.append((some, host))
        return results

    def _finish(
        self,
        batch: StepBatch,
        tokens: list[tuple[NDArray[np.intp], Tensor]],
        logits: list[tuple[NDArray[np.intp], Tensor]],
    ) -> StepOutput:
        sampling = batch.sampling
        output = StepOutput.empty(sampling)
        if batch.return_logits:
            output.logits = np.empty((len(batch.logits_rows), self._vocab_size), np.float32)
        self._adapter.synchronize()
        for rows, host in tokens:
            output.token_ids[rows] = host.numpy()
        if logits and sampling.masks is not None:
            sampling.masks.wait()
        for rows, host in logits:
            values = host.numpy()
            for row, raw in zip(rows.tolist(), values, strict=True):
                sample_row(raw, sampling, row, output)
            if output.logits is not None:
                output.logits[rows] = values
        return output

    def _loaded(self) -> Launches:
        if self._launches is None:
            raise DeviceError("this executor was closed")
        return self._launches


def _pieces(rows: NDArray[np.intp], most: int) -> list[NDArray[np.intp]]:
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _asks_for_more(sampling: SamplingBatch) -> NDArray[np.bool_]:
    """Which rows the device's sampler cannot serve, [R]."""
    asks = (np.diff(sampling.history_start) > 0) | (np.diff(sampling.bias_start) > 0) | (sampling.num_logprobs >= 0)
    if sampling.target is not None:
        asks |= sampling.target >= 0
    if sampling.masks is not None:
        asks |= sampling.masks.index >= 0
    return asks


def _parameters(sampling: SamplingBatch, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """What `sample` wants to know of the rows, [5, R]. The host makes the random numbers: all devices have the same."""
    uniform = [
        philox_uniform(seed, position) if temperature else 0.0
        for seed, position, temperature in zip(
            sampling.seed[rows].tolist(), sampling.position[rows].tolist(), sampling.temperature[rows], strict=True
        )
    ]
    columns = (sampling.temperature[rows], sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows], uniform)
    return np.array(columns, np.float64)
