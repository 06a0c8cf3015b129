"""Batches through a loaded decoder whose launches have fixed sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DeviceError
from ...weights.dtypes import DType
from ...weights.lora import LoraAdapter
from ..batch import SamplingBatch, StepBatch, StepOutput
from ..bucket_stats import BucketStats
from ..bucketing import Bucket, BucketPlan
from ..executor import Executor, Pending
from ..limits import ExecutorLimits
from ..sampling import philox_uniform, sample_row
from .adapter import Adapter, AsyncAdapter
from .ceilings import measure_ceilings
from .decoder import GraphDecoder
from .launches import Head, Launches
from .memory import MemoryPlan, MemoryUse
from .options import GraphOptions
from .splitting import Splitter
from .staging import HostMemory, Padding, pack
from .warm_up import Phase, warm_up

logger = logging.getLogger(__name__)

_Copied = tuple[NDArray[np.intp], Tensor]
_MAXIMA: dict[Phase, str] = {
    "prompt": "--prompt-bs-bucket-max or --prompt-seq-bucket-max",
    "decode": "--decode-bs-bucket-max or --decode-block-bucket-max (--decode-seq-bucket-max)",
}


class GraphExecutor(Executor):
    """A loaded model. A step is some launches of the layers, and then some of the head for its rows.

    Tokens are sampled on the device. The rows that ask for more (penalties, bias, masks, log-probabilities, logits) get
    theirs from the reference sampler on the host. `cache_use` has measured since before the KV cache was made.
    """

    def __init__(
        self,
        adapter: Adapter,
        decoder: GraphDecoder,
        limits: ExecutorLimits,
        plan: BucketPlan,
        memory: MemoryPlan | None,
        options: GraphOptions,
        cache_use: MemoryUse,
    ) -> None:
        self._mark = adapter.mark if isinstance(adapter, AsyncAdapter) else None
        self.limits = replace(limits, async_scheduling=self._mark is not None)
        self._adapter, self._plan, self._memory, self._options = adapter, plan, memory, options
        self._cache_use = cache_use
        self._splitter = Splitter(plan, limits.block_size)
        self._spare_row = len(decoder.hidden) - 1
        self._host_tokens = HostMemory(torch.int32, adapter.device)
        self._host_logits = HostMemory(torch.float32, adapter.device)
        self._warned = False
        buckets = [*plan.prompts, *plan.contexts, *plan.decodes]
        blocks = [group.padding_block for group in limits.groups]
        self._padding = Padding(blocks, self._spare_row, limits.num_states)
        self._loras = decoder.loras
        self._launches: Launches | None = Launches(adapter, decoder, buckets, self._padding, limits.block_size)
        self._started: _Started | None = None

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile all sizes, and capture their graphs, unless the options say otherwise."""
        self._adapter.enter()
        launches = self._loaded()
        if not self._options.skip_warmup:
            launches.warm_up_small(self._options.captures and self._adapter.captures)
        warm_up(launches, self._plan, self._memory, self._options, progress, captures=self._adapter.captures)
        launches.finish_warm_up()
        self._cache_use.tell("init_cache_engine")

    def start(self, batch: StepBatch) -> Pending:
        """Ask the device for the step, and for copies of what it gives. Raises DeviceError for media."""
        batch.refuse_media(self._adapter.name)
        self._adapter.enter()
        launches = self._loaded()
        launches.begin_step()
        self._host_tokens.begin_step()
        self._host_logits.begin_step()
        # Rows of one token share its hidden state.
        wanted, row_of = np.unique(batch.logits_rows, return_inverse=True)
        hidden_rows = row_of.astype(np.int32)
        token_rows = np.full(len(batch.token_ids), self._spare_row, np.int32)
        token_rows[wanted] = np.arange(len(wanted))
        self._run_layers(launches, batch, self._token_ids(batch), token_rows)
        is_asking = batch.sampling.asks_for_more()
        tokens = self._sample(launches, np.flatnonzero(~is_asking), hidden_rows, batch.sampling)
        logits = self._fetch_logits(launches, np.flatnonzero(is_asking), hidden_rows)
        sampling = batch.sampling.copy() if logits and self.limits.async_scheduling else batch.sampling
        done = self._adapter.synchronize if self._mark is None else self._mark()
        self._started = _Started(sampling, tokens, logits, done)
        return self._started

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._copy([pairs], group)

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy recurrent state between slots, `pairs[i] = (from, to)`, shape [N, 2], one after the other."""
        self._copy(_independent(pairs), None)

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter on the host until a step needs it. Raises DeviceError for one that cannot be computed."""
        assert self._loras is not None
        self._loras.load(number, adapter)

    def drop_lora(self, number: int) -> None:
        """Forget an adapter."""
        assert self._loras is not None
        self._loras.drop(number)

    def close(self) -> None:
        """Free weights, cache and graphs. Calling it twice is allowed."""
        if self._launches is not None:
            self._adapter.enter()
            self._adapter.synchronize()
            self._launches = self._started = None

    def stats(self) -> BucketStats:
        """Statistics of the launches since the warm-up, by bucket."""
        return self._loaded().stats()

    def measure_ceilings(self, dtype: DType, seconds: float) -> dict[str, float]:
        """The most that the device can do, see `ceilings.py`. Call it between steps."""
        self._adapter.enter()
        return measure_ceilings(self._adapter, dtype, seconds)

    def _token_ids(self, batch: StepBatch) -> NDArray[np.int32]:
        """The tokens of the batch: numbers below 0 stand for those that the device has, see `GraphDecoder.forward`."""
        if not batch.is_async:
            return batch.token_ids
        assert self._started is not None
        if self._started.is_on_device:
            return -1 - np.arange(len(batch.token_ids), dtype=np.int32)
        return np.maximum(self._started.wait().token_ids, 0)

    def _run_layers(
        self, launches: Launches, batch: StepBatch, token_ids: NDArray[np.int32], token_rows: NDArray[np.int32]
    ) -> None:
        num_sequences = len(batch.context_len)
        adapters = (
            np.zeros(num_sequences, np.int32)
            if self._loras is None
            else self._loras.slots_of(batch.adapters, num_sequences)
        )
        for phase, bucket, sequences, is_planned in self._splitter.split(batch):
            packed = pack(
                batch, token_ids, adapters, sequences, bucket, token_rows, self._padding, self.limits.block_size
            )
            if is_planned:
                num_tokens = np.diff(batch.query_start)[sequences].sum()
                launches.body(phase, bucket, packed, int(num_tokens))
                continue
            self._warn(phase, bucket)
            launches.body_outside(bucket, packed)

    def _copy(self, parts: Iterable[NDArray[np.int32]], group: int | None) -> None:
        self._adapter.enter()
        launches = self._loaded()
        for pairs in parts:
            launches.begin_step()
            launches.copy(pairs, group)
            self._adapter.synchronize()  # another copy, or a step, may now use the same host memory

    def _warn(self, phase: Phase, bucket: Bucket) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "A %s of %d sequences, %d tokens and %d KV blocks each is larger than all buckets: it runs unpadded "
                "and slowly, like others of its size. Raise %s. This is logged once.",
                phase,
                *bucket,
                _MAXIMA[phase],
            )

    def _sample(
        self, launches: Launches, rows: NDArray[np.intp], hidden_rows: NDArray[np.int32], sampling: SamplingBatch
    ) -> list[_Copied]:
        """The tokens of rows that are sampled on the device, in the order of the rows."""
        head: Head = "greedy" if (sampling.temperature[rows] == 0).all() else "sampled"
        results = []
        for part in _pieces(rows, launches.max_tokens):
            first = 0
            for some in _pieces(part, launches.max_rows[head]):
                parameters = None if head == "greedy" else _parameters(sampling, some)
                launches.head(head, hidden_rows[some], first, parameters)
                first += len(some)
            host = self._host_tokens.take(len(part))
            host.copy_(launches.tokens[: len(part)], non_blocking=self._host_tokens.pinned)
            results.append((part, host))
        return results

    def _fetch_logits(
        self, launches: Launches, rows: NDArray[np.intp], hidden_rows: NDArray[np.int32]
    ) -> list[_Copied]:
        results = []
        for some in _pieces(rows, launches.max_rows["logits"]):
            launches.head("logits", hidden_rows[some], 0)
            logits = launches.logits[: len(some)]
            host = self._host_logits.take(logits.numel()).view(logits.shape)
            host.copy_(logits, non_blocking=self._host_logits.pinned)
            results.append((some, host))
        return results

    def _loaded(self) -> Launches:
        if self._launches is None:
            raise DeviceError("this executor was closed")
        return self._launches


class _Started:
    """A step that the device was asked for. `tokens` and `logits` are rows, and what is copied of them to the host.

    `done` waits for these copies.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        tokens: list[_Copied],
        logits: list[_Copied],
        done: Callable[[], None],
    ) -> None:
        self._sampling, self._tokens, self._logits = sampling, tokens, logits
        self._done = done
        self._output: StepOutput | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether the device has the tokens of all rows, in their order."""
        return not self._logits and len(self._tokens) == 1

    def wait(self) -> StepOutput:
        """What the step gave. The rows that the device did not sample are sampled now."""
        if self._output is None:
            self._output = self._finish()
        return self._output

    def _finish(self) -> StepOutput:
        sampling = self._sampling
        output = StepOutput.empty(sampling)
        self._done()
        for rows, host in self._tokens:
            output.token_ids[rows] = host.numpy()
        if self._logits and sampling.masks is not None:
            sampling.masks.wait()
        for rows, host in self._logits:
            for row, raw in zip(rows.tolist(), host.numpy(), strict=True):
                sample_row(raw, sampling, row, output)
        return output


def _independent(pairs: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    """Pairs in an order, in parts of which each can be copied at once."""
    start, sources, targets = 0, set[int](), set[int]()
    for i, (source, target) in enumerate(pairs.tolist()):
        if source in targets or target in targets or target in sources:
            yield pairs[start:i]
            start, sources, targets = i, set(), set()
        sources.add(source)
        targets.add(target)
    yield pairs[start:]


def _pieces(rows: NDArray[np.intp], most: int) -> list[NDArray[np.intp]]:
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _parameters(sampling: SamplingBatch, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """The rows' parameters for `sample`, [5, R]. The host makes the random numbers, so all devices have the same."""
    uniform = [
        philox_uniform(seed, position) if temperature else 0.0
        for seed, position, temperature in zip(
            sampling.seed[rows].tolist(), sampling.position[rows].tolist(), sampling.temperature[rows], strict=True
        )
    ]
    columns = (sampling.temperature[rows], sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows], uniform)
    return np.array(columns, np.float64)
