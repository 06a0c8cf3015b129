"""Runs batches: pads them, passes them to compiled programs, and fetches their tokens."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from ...weights.dtypes import DType
from ...weights.lora import LoraAdapter
from ..batch import SamplingBatch, StepBatch
from ..bucket_stats import BucketStats, BucketUse
from ..bucketing import Bucket
from ..executor import Executor
from ..limits import ExecutorLimits, LoraLimits
from .buckets import smallest_holding
from .cache import StateShape, window_of
from .ceilings import measure_ceilings
from .inputs import row_inputs, step_inputs
from .loras import Loras, LoraSlots, rank_sizes
from .mesh import replicated
from .mixers import Params
from .pending import Rows, TpuPending
from .programs import COPIED_PAIRS, Programs

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """What lies on the chips: weights, adapters, pages and states, and where a step leaves its hidden states."""

    params: Params
    loras: Loras | None
    cache: list[jax.Array]
    hidden: jax.Array


class Wanted(NamedTuple):
    """A program: a `step` of `size` tokens, the `head` for so many rows, both with adapters of up to that `rank`;
    a `copy` in that cache group, one of `states`, or the writing of an `adapter`.
    """

    kind: Literal["step", "head", "copy", "states", "adapter"]
    size: int = 0
    rank: int = 0

    def __str__(self) -> str:
        with_adapters = f" with adapters of rank {self.rank}" if self.rank else ""
        return {
            "step": f"a step of {self.size} tokens{with_adapters}",
            "head": f"the head for {self.size} rows{with_adapters}",
            "copy": f"the copying of KV pages in cache group {self.size}",
            "states": "the copying of recurrent states",
            "adapter": "the writing of an adapter",
        }[self.kind]


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
        lora: LoraLimits | None = None,
    ) -> None:
        self.limits = limits
        self.late_compilations = 0
        self._programs, self._loaded = programs, loaded
        self._token_sizes, self._row_sizes = token_sizes, row_sizes
        self._compiled: dict[Wanted, Any] = {}
        self._ranks = rank_sizes(lora)
        self._lora_slots = None if lora is None or loaded.loras is None else LoraSlots(loaded.loras, lora)
        kept = [*enumerate(programs.decoder.kept)]
        self._states = [i for i, own in kept if isinstance(own, StateShape)]
        self._layers_of = [
            [i for i, own in kept if not isinstance(own, StateShape) and window_of(own) == group.window]
            for group in limits.groups
        ]
        self._sampled = self._on_device(np.zeros(row_sizes[-1], np.int32))
        self._last: TpuPending | None = None
        self._num_steps: Counter[int] = Counter()
        self._num_tokens: Counter[int] = Counter()
        self._closed = False

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile every program, the largest first, and run it once on padding."""
        programs = [Wanted("step", size, rank) for rank in self._ranks for size in reversed(self._token_sizes)]
        programs += [Wanted("head", size, rank) for rank in self._ranks for size in reversed(self._row_sizes)]
        programs += [Wanted("copy", group) for group, layers in enumerate(self._layers_of) if layers]
        programs += [Wanted("states")] * bool(self._states) + [Wanted("adapter")] * (self._lora_slots is not None)
        for done, wanted in enumerate(programs, 1):
            started = time.perf_counter()
            self._compile(wanted)
            self._run_on_padding(wanted)
            seconds = time.perf_counter() - started
            logger.info("[Warmup][%d/%d] %s in %.2f s", done, len(programs), wanted, seconds)
            progress(done, len(programs))

    def start(self, batch: StepBatch) -> TpuPending:
        """Give the batch to the device: its K and V are written, and its rows sampled, while the caller goes on.

        Raises DeviceError for media.
        """
        batch.refuse_media("tpu")
        if batch.is_async and self._last is not None and self._last.samples_on_host:
            batch = replace(batch, token_ids=np.maximum(self._last.result().token_ids, 0), is_async=False)
        batch, rank = self._with_slots(batch)
        num_tokens = len(batch.token_ids)
        size = smallest_holding(self._token_sizes, num_tokens)
        self._num_steps[size] += 1
        self._num_tokens[size] += num_tokens
        self._run_step(batch, size, rank)
        on_host = batch.sampling.asks_for_more()
        rows = []
        for host in (False, True):
            chosen = np.flatnonzero(on_host == host)
            most = self._row_sizes[-1]
            rows += [self._run_head(batch, chosen[i : i + most], host, rank) for i in range(0, len(chosen), most)]
        if rows:
            self._sampled = rows[0].token_ids
        self._last = TpuPending(batch.sampling, rows)
        return self._last

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV pages of a cache group, `pairs[i] = (from, to)`, shape [N, 2]."""
        self._open()
        if self._layers_of[group]:
            self._copy(Wanted("copy", group), pairs)

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy recurrent state between slots, `pairs[i] = (from, to)`, shape [N, 2], one after the other."""
        self._open()
        self._copy(Wanted("states"), pairs)

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Keep an adapter in the machine's memory. Raises DeviceError for what it cannot change."""
        self._adapters.load(number, adapter)

    def drop_lora(self, number: int) -> None:
        """Forget an adapter."""
        self._adapters.drop(number)

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

    @property
    def _adapters(self) -> LoraSlots:
        if self._lora_slots is None:
            raise DeviceError("this executor was loaded without adapters")
        return self._lora_slots

    def _with_slots(self, batch: StepBatch) -> tuple[StepBatch, int]:
        """The batch with slots as its adapters, which are written if they are new, and the rank of its programs."""
        if batch.adapters is None:
            return batch, 0
        if not (numbers := {*batch.adapters.tolist()} - {-1}):
            return replace(batch, adapters=None), 0
        rank = self._adapters.rank(numbers)
        slots, new = self._adapters.place(numbers)
        for number, slot in new.items():
            self._write_adapter(slot, self._adapters.contents(number))
        own = np.array([slots.get(number, -1) for number in batch.adapters.tolist()], np.int32)
        return replace(batch, adapters=own), rank

    def _run_step(self, batch: StepBatch, size: int, rank: int) -> None:
        limits = self.limits
        padding = [group.padding_block for group in limits.groups]
        inputs = step_inputs(
            batch, size, self._num_seqs(size), self._programs.width, padding, limits.block_size, limits.num_states
        )
        program, loaded = self._program(Wanted("step", size, rank)), self._open()
        cache, hidden = program(*loaded, self._sampled, self._on_device(inputs))
        self._loaded = loaded._replace(cache=cache, hidden=hidden)

    def _run_head(self, batch: StepBatch, rows: NDArray[np.intp], on_host: bool, rank: int) -> Rows:
        size = smallest_holding(self._row_sizes, len(rows))
        inputs, loaded = self._on_device(row_inputs(batch, rows, size)), self._loaded
        program = self._program(Wanted("head", size, rank))
        token_ids, logits = program(loaded.params, loaded.loras, loaded.hidden, inputs)
        (logits if on_host else token_ids).copy_to_host_async()
        return Rows(rows, token_ids, logits if on_host else None)

    def _copy(self, wanted: Wanted, pairs: NDArray[np.int32] | None = None) -> None:
        """Copy pages or states; None copies padding alone."""
        if wanted.kind == "states":
            layers, padding = self._states, self.limits.num_states
        else:
            layers, padding = self._layers_of[wanted.size], self.limits.groups[wanted.size].padding_block
        cache, program = self._open().cache, self._program(wanted)
        for start in range(0, 1 if pairs is None else len(pairs), COPIED_PAIRS):
            padded = np.full((COPIED_PAIRS, 2), padding, np.int32)
            if pairs is not None:
                some = pairs[start : start + COPIED_PAIRS]
                padded[: len(some)] = some
            copied = program([cache[layer] for layer in layers], self._on_device(padded))
            for layer, array in zip(layers, copied, strict=True):
                cache[layer] = array

    def _write_adapter(self, slot: int, contents: Loras) -> None:
        program, loaded = self._program(Wanted("adapter")), self._open()
        self._loaded = loaded._replace(
            loras=program(loaded.loras, self._on_device(np.int32(slot)), self._on_device(contents))
        )

    def _on_device(self, inputs: Any) -> Any:
        return jax.device_put(inputs, replicated(self._programs.mesh))

    def _num_seqs(self, num_tokens: int) -> int:
        """No step has more sequences than tokens."""
        return min(num_tokens, self.limits.max_num_seqs)

    def _open(self) -> Loaded:
        if self._closed:
            raise DeviceError("this executor was closed")
        return self._loaded

    def _program(self, wanted: Wanted) -> Any:
        if wanted not in self._compiled:
            self._open()
            self.late_compilations += 1
            logger.warning("Compiling %s while serving, because it was not warmed up", wanted)
            self._compile(wanted)
        return self._compiled[wanted]

    def _compile(self, wanted: Wanted) -> None:
        programs, (kind, size, rank) = self._programs, wanted
        if kind == "step":
            program = programs.step(size, self._num_seqs(size), rank)
        elif kind == "head":
            program = programs.head(size, rank)
        elif kind == "copy":
            program = programs.copy(self._layers_of[size])
        elif kind == "states":
            program = programs.copy(self._states)
        else:
            program = programs.adapter()
        self._compiled[wanted] = program.compile()

    def _run_on_padding(self, wanted: Wanted) -> None:
        kind, size, rank = wanted
        padding = _padding_batch([group.padding_block for group in self.limits.groups], self.limits.num_states)
        if kind == "step":
            self._run_step(padding, size, rank)
        elif kind == "head":
            jax.block_until_ready(self._run_head(padding, np.zeros(size, np.intp), False, rank).token_ids)
        elif kind in ("copy", "states"):
            self._copy(wanted)
        else:
            assert self._loaded.loras is not None
            empty = jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), self._loaded.loras.one_slot)
            self._write_adapter(0, empty)
        jax.block_until_ready(self._loaded)


def _padding_batch(padding: list[int], padding_state: int) -> StepBatch:
    """A sequence of one token, in the pages and the state of padding, and its row."""
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
        state_slots=np.full(1, padding_state, np.int32),
    )
