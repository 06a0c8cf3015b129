"""StepRoom: how many tokens of a prompt a step has room for, by the device's limits and by time."""

from __future__ import annotations

from dataclasses import replace

from ..cost_model import CostModel, StepLoad
from ..devices.limits import ExecutorLimits, StepShape
from ..sequences.sequence import Sequence
from .rows import StepRows
from .step import Step

_ALIGNED_BLOCKS = 4  # chunks of this many and more end where a block does
_STAGE_TOKENS = 128  # of prompts in a step of a pipeline, so that a prompt keeps all stages busy


class StepRoom:
    """Room for chunks of prompts. Where shapes are fixed it is the padded step that must not be too large."""

    def __init__(self, limits: ExecutorLimits, cost_model: CostModel) -> None:
        self._limits = limits
        self._cost_model = cost_model
        self._query_lens = sorted({shape.query_len for shape in limits.shapes}, reverse=True)

    def chunk_tokens(self, step: Step, sequence: Sequence, start: int, limit_ms: float | None) -> int:
        """How many tokens from position `start` fit in the step; with `limit_ms`, also in that time."""
        limits, rows = self._limits, step.rows
        left = sequence.num_tokens - start
        if limits.max_prefill_seqs is not None and len(rows.chunks) >= limits.max_prefill_seqs:
            return 0
        room = self._room(rows)
        scored = sequence.num_scored < sequence.prompt_len - 1
        fitting = left if limit_ms is None else self._cost_model.chunk_tokens(step.load, start, limit_ms, scored=scored)
        if not limits.chunked_prefill:
            return left if left <= room and (left <= fitting or not rows.chunks) else 0
        block_size = limits.block_size
        if _ALIGNED_BLOCKS * block_size <= fitting < left:
            # Ending at a block's end makes the block available to others at once; a small chunk would lose too much.
            fitting = (start + fitting) // block_size * block_size - start
        tokens = min(left, room, fitting)
        return tokens if sequence.media is None else sequence.media.uncut(start, tokens, min(left, room))

    def padded(self, step: Step) -> StepLoad:
        """The step's load on the device, including padding tokens."""
        rows, load = step.rows, step.load
        if not self._limits.shapes or not rows:
            return load
        num_tokens = self._limits.padded(_shape(rows)).num_tokens
        if load.prefill_tokens:
            return replace(load, prefill_tokens=num_tokens - load.num_decodes)
        return replace(load, num_decodes=num_tokens)

    def _room(self, rows: StepRows) -> int:
        """The longest chunk that the step may have in addition to what it runs."""
        most = self._limits.max_num_batched_tokens
        if not self._limits.shapes:
            if self._limits.pipeline_stages > 1:
                most = min(most, _STAGE_TOKENS + len(rows.decodes))
            return max(most - rows.num_tokens, 0)
        shape = _shape(rows)
        sequences = shape.num_sequences + 1
        for query_len in (most // sequences, *self._query_lens):
            with_chunk = StepShape(sequences, max(shape.query_len, query_len))
            if self._limits.padded(with_chunk).num_tokens <= most:
                return query_len
        return 0


def _shape(rows: StepRows) -> StepShape:
    longest = max([span.end - span.start for span in rows.spans], default=min(len(rows.decodes), 1))
    return StepShape(len(rows.decodes) + len(rows.spans), longest)
