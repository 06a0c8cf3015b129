"""Async (overlap) scheduling: a step is made before the tokens of the last one are sampled, for devices that have
these tokens themselves and need not wait for the host.
"""

from __future__ import annotations

from ..cache.manager import CacheManager
from ..cost_model import StepLoad
from ..devices.batch import StepOutput
from ..sequences.sequence import Sequence, SequenceState
from .running import Running
from .step import Step
from .waiting import WaitingQueue


class AsyncScheduling:
    """Goes on with the decodes of a step where the sampled tokens decide nothing but which sequences have ended.

    A sequence that has ended is run once more for nothing. It writes to blocks that it still had when the step was
    started, behind all tokens that others could find in the cache. A later owner of the block writes after it.
    """

    def __init__(self, cache: CacheManager, running: Running, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting

    def after(self, step: Step) -> Step | None:
        """The same decodes, a token further; None if the step has to be committed first."""
        running, rows = self._running, step.rows
        if rows.spans or rows.has_beams or step.decode_version != running.decode_version:
            return None
        if running.prefilling or self._cache.has_changed or self._waiting.peek() is not None:
            return None
        if not all(self._goes_on(sequence) for sequence in rows.decodes):
            return None
        following = Step(decode_version=step.decode_version, is_async=True)
        following.rows.set_decodes(rows.decodes)
        pairs = sum([sequence.num_tokens + 1 for sequence in rows.decodes])
        following.load = StepLoad(len(rows.decodes), pairs)
        return following

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether the sequence may have a token behind the one that is being sampled, and has a place for that."""
        length = sequence.num_tokens + 1
        return (
            length <= sequence.num_blocks * self._cache.block_size
            and length < sequence.max_length
            and length != sequence.min_length  # its stop tokens are forbidden until then
            and sequence.constraint is None
            and not sequence.sampling.uses_history
        )


def drop_ended(step: Step, output: StepOutput) -> StepOutput:
    """Leave those out of a step that have ended since it was started; the rows of the others."""
    rows = step.rows
    going_on = [row for row, sequence in enumerate(rows.decodes) if sequence.state is SequenceState.DECODING]
    if len(going_on) == len(rows.decodes):
        return output
    rows.set_decodes([rows.decodes[row] for row in going_on])
    return output.of_rows(going_on)
