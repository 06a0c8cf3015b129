"""A ragged batch as launches: which sequences run together, and the size that they are padded to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch import StepBatch
from ..bucketing import Bucket, BucketPlan
from .warm_up import Phase


class Launch(NamedTuple):
    """Sequences of a batch (their indices) that run together. Outside of the plan, `bucket` is hardly padded."""

    phase: Phase
    bucket: Bucket
    sequences: NDArray[np.intp]
    is_planned: bool


class Splitter:
    """Splits batches by the buckets of a plan.

    Sequences with one token run together as decodes. Prompts that begin run together if their buckets have the same
    length. A chunk with cached context runs alone. What no bucket holds runs as it is, in a table whose width is
    rounded up to a power of two.
    """

    def __init__(self, plan: BucketPlan, block_size: int) -> None:
        self._plan, self._block_size = plan, block_size

    def split(self, batch: StepBatch) -> Iterator[Launch]:
        """The launches of a batch. Each sequence is in one of them."""
        lengths = np.diff(batch.query_start)
        sizes = np.stack([lengths, -(-batch.context_len // self._block_size)], axis=1)
        if (decodes := np.flatnonzero(lengths == 1)).size:
            yield from self._launches("decode", decodes, sizes)
        fresh = np.flatnonzero((lengths > 1) & (batch.context_len == lengths))
        kinds: dict[int | None, list[int]] = {}
        for sequence in fresh.tolist():
            bucket = self._bucket("prompt", 1, *sizes[sequence].tolist())
            kinds.setdefault(bucket and bucket.query_len, []).append(sequence)
        alone = [[sequence] for sequence in np.flatnonzero((lengths > 1) & (batch.context_len > lengths)).tolist()]
        alone += [[sequence] for sequence in kinds.pop(None, [])]
        for sequences in (*kinds.values(), *alone):
            yield from self._launches("prompt", np.array(sequences), sizes)

    def _launches(self, phase: Phase, sequences: NDArray[np.intp], sizes: NDArray[np.int32]) -> Iterator[Launch]:
        """All of them in one bucket, or else those that fit into any, in halves, and the others together."""
        count, (length, width) = len(sequences), sizes[sequences].max(axis=0).tolist()
        if (bucket := self._bucket(phase, count, length, width)) is not None:
            yield Launch(phase, bucket, sequences, True)
            return
        fits = np.array([self._bucket(phase, 1, *sizes[s].tolist()) is not None for s in sequences.tolist()])
        fitting, others = sequences[fits], sequences[~fits]
        if fitting.size:
            # The shorter half may do with a narrower bucket.
            fitting = fitting[np.argsort(sizes[fitting, 1], kind="stable")]
            halves = [fitting] if others.size else np.array_split(fitting, 2)
            for half in halves:
                yield from self._launches(phase, half, sizes)
        if others.size:
            length, width = sizes[others].max(axis=0).tolist()
            yield Launch(phase, Bucket(len(others), length, 1 << (width - 1).bit_length()), others, False)

    def _bucket(self, phase: Phase, count: int, length: int, width: int) -> Bucket | None:
        plan = self._plan
        return plan.decode(count, width) if phase == "decode" else plan.prompt(count, length, width)
